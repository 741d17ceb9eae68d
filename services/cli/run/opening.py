"""Opens the run of ``millrace run``: a new one of a recipe, or the one to go on with, with its changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.cli.check.launch import check_launch
from services.cli.check.recipe import check_named
from services.cli.console.plain import say
from services.cli.plan.profiles import load_with_profile
from services.cli.run.change import save_changes, with_changes
from services.cli.run.resume import AUTO, choose
from services.cli.run.run_directory import prepare, reopen
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError


def opened(
    recipe: Path | None, resume: str | None, overrides: Sequence[str], profile: str | None, console: Console
) -> tuple[Recipe, Path]:
    """The resolved recipe and the directory of a new run, or of the one to go on with, checked either way.

    Raises:
        ConfigError: neither or both are named, the recipe cannot run, or the run cannot go on so.
    """
    if (recipe is None) != (resume not in (None, AUTO)):
        raise ConfigError(
            "name a recipe to start a run (with --resume auto to go on with its newest one that has not ended), or --resume RUN "
            "to go on with one; not both"
        )
    if recipe is None:
        if profile:
            raise ConfigError("a run that goes on keeps its profile: leave out --profile, or start another run")
        resolved, run_dir = reopen(Path(str(resume)), console)
        if overrides:
            resolved, changes = with_changes(resolved, run_dir, overrides)
            check_launch(resolved)
            check_named(resolved)
            save_changes(resolved, run_dir, changes)
            for setting, (former, new) in changes.items():
                say(console, f"{setting}: {former} -> {new}")
        return resolved, run_dir
    loaded = load_with_profile(recipe, overrides, profile)
    choice = choose(loaded, asked=resume == AUTO)
    if choice.told:
        say(console, choice.told)
    if choice.run_dir is not None:
        return reopen(choice.run_dir, console)
    check_launch(loaded)
    check_named(loaded)
    return prepare(loaded)
