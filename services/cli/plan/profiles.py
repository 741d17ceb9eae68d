"""``--profile``: transforms a whole recipe before the run or the check.

The transformations are pure; ``plan.local_data`` finds the data on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from services.cli.plan.local_data import rows_here, world_here
from services.common.config.profiles.tiny import FindRows, FindWorld, tiny
from services.common.config.reading.loading import Profile, load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError


class Transformation(Protocol):
    """A profile: a pure function from a recipe's tree to another."""

    def __call__(self, tree: Mapping[str, Any], find_rows: FindRows, find_world: FindWorld) -> dict[str, Any]: ...


PROFILES: dict[str, Transformation] = {"tiny": tiny}


def load_with_profile(path: Path, overrides: Sequence[str], profile: str | None) -> Recipe:
    """Read a recipe, through a profile when one is named; ``ConfigError`` names the profiles there are."""
    return load_recipe(path, overrides, profile=_profile(profile, rows_here, world_here))


def load_for_any_machine(path: Path, overrides: Sequence[str], profile: str | None) -> Recipe:
    """Load a recipe for an unknown machine: neither variables nor files of this one count.

    Datasets and worlds are those that the recipe names; a process that starts there finds its local files.
    """
    return load_recipe(path, overrides, {}, profile=_profile(profile, dict, lambda *_: None))


def _profile(name: str | None, find_rows: FindRows, find_world: FindWorld) -> Profile | None:
    if name is None:
        return None
    if name not in PROFILES:
        raise ConfigError(f"there is no profile {name!r}; write one of {', '.join(PROFILES)}")
    return partial(PROFILES[name], find_rows=find_rows, find_world=find_world)
