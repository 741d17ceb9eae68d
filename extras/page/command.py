"""The command ``rollmill page``. The server is imported when the command is called, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands import chosen_run
from services.cli.console import console
from services.common.errors import ConfigError


def page(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, to be compared. Left out: the newest below ./runs.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where the page is; 0 takes a free port.", min=0, max=65535)] = 8420,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Another than loopback needs the run's keys.")
    ] = "127.0.0.1",
) -> None:
    """Show runs in the browser: their state, curves, conversations token by token, fates, weights, stalls and events.

    Reads the run directories: during the run, after its end, and after any process was killed. While a run goes on, its
    orchestrator is asked too. Makes no change, and loads no file from other hosts. Runs that differ in the seed alone are one
    curve with a band. From another machine: `ssh -L 8420:127.0.0.1:8420 HOST`. docs/page.md has the views and the keys.

        rollmill page
        rollmill page runs/a runs/b --port 9000
    """
    try:
        from extras.page.server import show
    except ModuleNotFoundError as error:
        from services.common.installing import install

        raise ConfigError(
            f"the page needs the package {error.name}, which is not installed here: {install('page')}"
        ) from None
    show(runs or [chosen_run(None)], host, port, console)
