"""``--profile``: transforms a whole recipe before the run or the check.

The transformations are pure. The data of this machine are found here: rows of a dataset or of a similar one, and the files
of an environment's world, made if needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.loading import Profile, load_recipe
from services.common.config.profiles.tiny import FindRows, FindWorld, World, tiny
from services.common.config.reading.unread import unread_variables
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError
from services.common.extras import load_extra, provided
from services.orchestrator.tasks.code_rows import code_row
from services.orchestrator.tasks.math_rows import math_row
from services.orchestrator.tasks.rows import known, local_file

# Preferred stand-ins first: rows with reference answers and short prompts.
_STAND_INS = ("deepscaler", "math-train", "gsm8k", "leetcode", "humaneval", "math500", "code-contests")


def rows_here(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a dataset that is on this machine: the same dataset if its rows are here, else one with rows of the
    same form, else generated rows. A dataset without a name is assumed to be here."""
    name = dataset.get("name")
    if name is None or local_file(name) is not None:
        return dict(dataset)
    form = known(name).normalise
    for other in _STAND_INS:
        if known(other).normalise is form and local_file(other) is not None:
            return {**dataset, "name": other, "id_field": None}
    made = {math_row: "sums", code_row: "programs"}
    if form not in made:
        raise DatasetError(f"dataset {name!r} is not on this machine, and no other has rows like it")
    generator = f"services.common.tiny:{made[form]}"
    return {**dataset, "name": None, "generator": generator, "settings": {}, "id_field": "id"}


def world_here(environment: str, tree: Mapping[str, Any]) -> World | None:
    """Settings that point an environment to its world on this machine, and its tasks; None if it needs no files.

    Takes the folder that the recipe names if present, else makes a world once, below the recipe's directory of runs.

    Raises:
        ConfigError: the environment's engine is not installed.
    """
    if tree["envgateway"] is None:
        return None
    if environment not in provided("stand_ins"):
        return None
    worlds = Path(tree["run"]["dir"]).resolve() / "worlds"
    section, rows = load_extra("stand_ins", environment)(tree["envgateway"][environment], worlds)
    return {environment: section}, rows


PROFILES = {"tiny": tiny}


def load_with_profile(path: Path, overrides: Sequence[str], profile: str | None) -> Recipe:
    """Read a recipe, through a profile when one is named; ``ConfigError`` names the profiles there are. Writes a warning for
    each variable that looks like one of ours and is not read."""
    recipe = load_recipe(path, overrides, profile=_profile(profile, rows_here, world_here))
    for sentence in unread_variables(recipe, os.environ):
        sys.stderr.write(f"warning: {sentence}\n")
    return recipe


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
