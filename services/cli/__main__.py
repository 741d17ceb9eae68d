"""The ``millrace`` command: start, check, watch and read runs."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Annotated

import structlog
import typer
from rich.console import Console

from services.cli.data_commands import data_app
from services.cli.errors import Interrupted, exit_code, tell
from services.cli.journal.command import journal_app
from services.cli.keys import keys_app
from services.cli.live_commands import live_app
from services.cli.reading_commands import reading_app
from services.cli.recipe_commands import recipe_app
from services.common.errors import MillraceError
from services.common.logs import quiet_grpc

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="Asynchronous reinforcement learning for LLM agents.\n\n"
    "Begin with `millrace run recipes/quickstart`: it trains a small model on this machine in minutes.",
)
for commands in (recipe_app, live_app, reading_app):
    app.add_typer(commands)  # unnamed: its commands are the app's own
app.add_typer(data_app, name="data")
app.add_typer(journal_app, name="journal")
app.add_typer(keys_app, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("millrace"))
        raise typer.Exit


@app.callback()
def millrace(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: errors of ours are told in words, with exit code 2 for the user's and 1 for the rest."""
    quiet_grpc()
    # What commands do in this process is told in their own words; `run` sets up logs of its own.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    stderr = Console(stderr=True)
    try:
        app(standalone_mode=True)
    except MillraceError as error:
        tell(error, stderr)
        raise SystemExit(exit_code(error)) from None
    except Interrupted as interruption:
        stderr.print(str(interruption), soft_wrap=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
