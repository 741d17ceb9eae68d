"""Options, arguments and the console that several commands of ``rollmill`` use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.common.config.reading.inherit import shipped_recipe

console = Console()


def _file_of_name(recipe: Path | None) -> Path | None:
    """The file of a recipe that comes with Rollmill, where it is named and no file or directory has this name."""
    return recipe if recipe is None or recipe.exists() else shipped_recipe(str(recipe)) or recipe


RECIPE_HELP = "A recipe.yaml, a directory that holds one, or the name of a recipe of Rollmill, such as `quickstart`."
RecipeArgument = Annotated[Path, typer.Argument(help=RECIPE_HELP, callback=_file_of_name)]
OptionalRecipeArgument = Annotated[Path | None, typer.Argument(help=RECIPE_HELP, callback=_file_of_name)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. `--set run.steps=20`. May be repeated.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Transform the recipe as a whole: `tiny` tries it on two CPU cores.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object on the last line.")]
