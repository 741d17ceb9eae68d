"""The run that a command reads: the one that is named, else the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[
    Path | None,
    typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000. Left out: the newest below ./runs."),
]


def chosen_run(run: Path | None) -> Path:
    """The run that is named, else the newest, which stderr then names."""
    from services.cli.inspect.standing import run_or_newest

    found = run_or_newest(run)
    if run is None:
        typer.echo(f"run: {found} (the newest)", err=True)
    return found
