"""``--profile``: a recipe transformed as a whole before it is run, checked or resolved.

The transformations are pure; what lies on this machine they are told by ``services.cli.here``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.cli.here import rows_here, world_here
from services.common.config.loading import load_recipe
from services.common.config.profiles.tiny import tiny
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError


def load_with_profile(path: Path, overrides: Sequence[str], profile: str | None) -> Recipe:
    """Read a recipe, through a profile when one is named; ``ConfigError`` names the profiles there are."""
    if profile is None:
        return load_recipe(path, overrides)
    if profile not in PROFILES:
        raise ConfigError(f"there is no profile {profile!r}; write one of {', '.join(PROFILES)}")
    return load_recipe(path, overrides, profile=PROFILES[profile])


PROFILES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tiny": partial(tiny, find_rows=rows_here, find_world=world_here)
}
