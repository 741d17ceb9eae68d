"""``--profile``: a recipe transformed as a whole before it is run, checked or resolved.

The transformations are pure; what lies on this machine they are told by ``services.cli.here``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from services.cli.here import rows_here, world_here
from services.common.config.loading import Profile, load_recipe
from services.common.config.profiles.tiny import FindRows, FindWorld, tiny
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
    """The same for a machine that is not known yet: neither variables nor files of this one count.

    Datasets and worlds are those that the recipe names; a process that is started there finds what lies there.
    """
    return load_recipe(path, overrides, {}, profile=_profile(profile, dict, lambda *_: None))


def _profile(name: str | None, find_rows: FindRows, find_world: FindWorld) -> Profile | None:
    if name is None:
        return None
    if name not in PROFILES:
        raise ConfigError(f"there is no profile {name!r}; write one of {', '.join(PROFILES)}")
    return partial(PROFILES[name], find_rows=find_rows, find_world=find_world)
