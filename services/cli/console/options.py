"""Options, arguments and the console that several commands of ``millrace`` use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe.yaml, or a directory that holds one.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. `--set run.steps=20`. May be repeated.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Transform the recipe as a whole: `tiny` tries it on two CPU cores.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object on the last line.")]
