"""``--profile``: a recipe transformed as a whole before it is run, checked or resolved.

The transformations are pure; here they are told which rows lie on this machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.loading import load_recipe
from services.common.config.profiles.tiny import World, tiny
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError
from services.orchestrator.catalogue import DATA_ROOT, known, local_file
from services.orchestrator.rows.code import code_row
from services.orchestrator.rows.math import math_row

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
    generator = f"services.common.tiny_tasks:{made[form]}"
    return {**dataset, "name": None, "generator": generator, "settings": {}, "id_field": "id"}


def world_here(environment: str, tree: Mapping[str, Any]) -> World | None:
    """Where an environment's world lies on this machine, with its tasks; None for one that needs no files of its own.

    ALFWorld's games that are kept as rows are unpacked below the recipe's directory of runs.

    Raises:
        ConfigError: there is none, with what to set.
    """
    root = os.environ.get(DATA_ROOT)
    if environment == "alfworld":
        folder = _games_folder(tree, Path(root) if root else None)
        rows = {"generator": "services.common.tiny_tasks:games", "settings": {"data": str(folder)}}
        return {"alfworld": {"data": str(folder), "games": None}}, rows
    if environment == "webshop":
        own = tree["envgateway"]["webshop"]
        rows = {"generator": "services.common.tiny_tasks:places", "settings": {"count": 64}}
        if own["data"] is not None and Path(own["data"]).is_dir():
            return {}, rows
        shop = Path(root, "webshop_made") if root else None
        if shop is None or not shop.is_dir():
            raise ConfigError(_nowhere("envgateway.webshop.data", "a catalogue in WebShop's raw form", "webshop_made"))
        goals = shop / "oracle-goals.json"
        return {"webshop": {"data": str(shop), "goals": str(goals) if goals.is_file() else None}}, rows
    return None


def _games_folder(tree: Mapping[str, Any], root: Path | None) -> Path:
    from services.envgateway.envs.alfworld.unpack import unpack

    own = tree["envgateway"]["alfworld"]["data"]
    if own is not None and Path(own).is_dir():
        return Path(own)
    rows = root / "alfworld_made" if root else None
    if rows is None or not (rows / "games.jsonl").is_file():
        raise ConfigError(_nowhere("envgateway.alfworld.data", "ALFWorld's json_2.1.1", "alfworld_made/games.jsonl"))
    folder = Path(tree["run"]["dir"]).resolve() / "worlds" / "alfworld"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix="alfworld-", dir=folder.parent))
        unpack(rows / "games.jsonl", rows / "domain.json", partial_folder)
        try:
            partial_folder.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(partial_folder)
    return folder


def _nowhere(setting: str, what: str, made: str) -> str:
    return (
        f"there is no world to play in on this machine: set {setting} to {what}, or {DATA_ROOT} to a folder with {made}"
    )


PROFILES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tiny": partial(tiny, find_rows=rows_here, find_world=world_here)
}
