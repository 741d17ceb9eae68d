"""``--profile``: a recipe transformed as a whole before it is run, checked or resolved.

The transformations are pure; here they are told which rows lie on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.loading import load_recipe
from services.common.config.profiles.tiny import tiny
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError

# Preferred stand-ins first: rows with reference answers and short prompts.
_STAND_INS = ("deepscaler", "math-train", "gsm8k", "leetcode", "humaneval", "math500", "code-contests")


def load_with_profile(path: Path, overrides: Sequence[str], profile: str | None) -> Recipe:
    """Read a recipe, through a profile when one is named; ``ConfigError`` names the profiles there are."""
    if profile is None:
        return load_recipe(path, overrides)
    if profile not in PROFILES:
        raise ConfigError(f"there is no profile {profile!r}; write one of {', '.join(PROFILES)}")
    return load_recipe(path, overrides, profile=PROFILES[profile])


def rows_here(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a dataset that is read from this machine: the same one when its rows are here, else one with rows of
    the same form, else made ones. What is no dataset known by name is taken to be here."""
    from services.orchestrator.catalogue import known, local_file
    from services.orchestrator.rows.code import code_row
    from services.orchestrator.rows.math import math_row

    name = dataset.get("name")
    if name is None or local_file(name) is not None or known(name).indices is not None:
        return dict(dataset)
    form = known(name).normalise
    for other in _STAND_INS:
        if known(other).normalise is form and local_file(other) is not None:
            return {**dataset, "name": other, "id_field": None}
    made = {math_row: "sums", code_row: "programs"}
    if form not in made:
        raise DatasetError(f"dataset {name!r} is not on this machine, and no other has rows like it")
    generator = f"services.common.tiny_tasks:{made[form]}"
    return {**dataset, "name": None, "generator": generator, "settings": {}, "id_field": "id"}


PROFILES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"tiny": partial(tiny, find_rows=rows_here)}
