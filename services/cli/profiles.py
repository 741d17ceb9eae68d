"""``--profile``: transforms a whole recipe before the run or the check.

The transformations are pure. The data of this machine are found here: rows of a dataset or of a similar one, and the files
of an environment's world, made if needed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.loading import Profile, load_recipe
from services.common.config.profiles.tiny import FindRows, FindWorld, World, tiny
from services.common.config.reading.unread import unread_variables
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError
from services.orchestrator.tasks.code_rows import code_row
from services.orchestrator.tasks.math_rows import math_row
from services.orchestrator.tasks.rows import DATA_ROOT, known, local_file

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

    Takes the folder that the recipe names if present, else the one in ``ROLLMILL_DATA_ROOT``, else makes a world.
    Unpacks or makes the world once, below the recipe's directory of runs.

    Raises:
        ConfigError: the environment's engine is not installed.
    """
    if tree["envgateway"] is None:
        return None
    root = os.environ.get(DATA_ROOT)
    worlds = Path(tree["run"]["dir"]).resolve() / "worlds"
    if environment == "alfworld":
        games = _games_folder(tree["envgateway"]["alfworld"]["data"], root, worlds)
        rows = {"generator": "services.common.tiny:games", "settings": {"data": str(games)}}
        return {"alfworld": {"data": str(games), "games": None}}, rows
    if environment == "webshop":
        section, num_goals = _shop(tree["envgateway"]["webshop"]["data"], root, worlds)
        rows = {"generator": "services.common.tiny:places", "settings": {"count": num_goals}}
        return {"webshop": section}, rows
    return None


def _games_folder(own: str | None, root: str | None, worlds: Path) -> Path:
    from services.envgateway.envs.alfworld import houses, package_data, unpack, write_games

    if own is not None and Path(own).is_dir():
        return Path(own)
    kept = Path(root or "", "alfworld_made")
    if root and (kept / "games.jsonl").is_file():
        return _written_once(
            worlds / "alfworld", lambda folder: unpack(kept / "games.jsonl", kept / "domain.json", folder)
        )

    def make(folder: Path) -> None:
        package = package_data()
        grammar = (package / "alfred.twl2").read_text(encoding="utf-8")
        write_games(houses(24, 1, grammar), (package / "alfred.pddl").read_text(encoding="utf-8"), folder)

    return _written_once(worlds / "alfworld-houses", make)


def _shop(own: str | None, root: str | None, worlds: Path) -> tuple[dict[str, Any], int]:
    """Settings of the gateway's section, and the least number of tasks. Every word counts as a noun, so that no tagger
    model is needed."""
    from services.envgateway.envs.webshop import write_catalogue

    if own is not None and Path(own).is_dir():
        return {"tagger": "words"}, 64
    kept = Path(root or "", "webshop_made")
    if root and kept.is_dir():
        goals = kept / "oracle-goals.json"
        return {"data": str(kept), "goals": str(goals) if goals.is_file() else None, "tagger": "words"}, 64
    made = _written_once(worlds / "webshop-catalogue", lambda folder: write_catalogue(folder, 48, 1))
    return {"data": str(made), "goals": None, "tagger": "words"}, 48


def _written_once(folder: Path, write: Callable[[Path], object]) -> Path:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        write(partial_folder)
        try:
            partial_folder.rename(folder)
        except OSError:  # another run has written it meanwhile
            shutil.rmtree(partial_folder)
    return folder


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
