"""The ``rollmill`` command: start, check, watch and read runs."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated

import structlog
import typer
from rich.console import Console

from services.cli.commands import live_app, recipe_app
from services.cli.console import Interrupted, exit_code, say, tell
from services.cli.keys_command import keys_app
from services.cli.run_commands import journal_app, reading_app, results_app
from services.common.errors import InfrastructureError, RollmillError
from services.common.extras import provided
from services.common.telemetry.logs import quiet_grpc, settle
from services.start import raise_open_files

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="Asynchronous reinforcement learning for LLM agents.\n\n"
    "Begin with `rollmill run quickstart`: it trains a small model on this machine in minutes. `rollmill new mine` writes a recipe, a reward and rows to change.",
)
for name, path in provided("commands").items():
    command = resolve_name(path)  # not by load_object, which puts the current directory on the path
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        reading_app.command(name)(command)
for commands in (recipe_app, live_app, reading_app, results_app):
    app.add_typer(commands)  # unnamed: its commands are the app's own
app.add_typer(journal_app, name="journal")
app.add_typer(keys_app, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("rollmill"))
        raise typer.Exit


@app.callback()
def rollmill(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Prints errors of the project as sentences; exits with 2 for errors of the user and 1 for others."""
    if sys.getfilesystemencoding() != "utf-8":  # arguments, names and texts are UTF-8 under every locale
        shown = {"PYTHONIOENCODING": os.device_encoding(1) or "utf-8", **os.environ, "PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], shown)
    # Of these the run, its directory or a server is the result, and not the output.
    settle(outlives_output=sys.argv[1:2] in (["run"], ["eval"], ["start"], *([name] for name in provided("commands"))))
    home = os.path.expanduser("~")
    sys.argv[1:] = [re.sub(r"(^|=)~(?=/|$)", lambda found: found[1] + home, word) for word in sys.argv[1:]]
    quiet_grpc()
    raise_open_files()
    # Commands print their own messages; `run` configures its own logs.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    stderr = Console(stderr=True)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SystemExit("error: the current directory has been deleted: change to one that exists") from None
    try:
        app(standalone_mode=True)
    except RollmillError as error:
        tell(error, stderr)
        raise SystemExit(exit_code(error)) from None
    except Interrupted as interruption:
        say(stderr, str(interruption))
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        tell(InfrastructureError(f"cannot write: {error}"), stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter leaves the rest of the output
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
