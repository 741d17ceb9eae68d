"""What lies on this machine: rows of a dataset, or ones of the same form; the world of an environment, or a made one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.common.config.profiles.tiny import World
from services.common.errors import DatasetError
from services.orchestrator.catalogue import DATA_ROOT, known, local_file
from services.orchestrator.rows.code import code_row
from services.orchestrator.rows.math import math_row

# Preferred stand-ins first: rows with reference answers and short prompts.
_STAND_INS = ("deepscaler", "math-train", "gsm8k", "leetcode", "humaneval", "math500", "code-contests")


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

    What the recipe names is taken if it is there, else what lies in ``MILLRACE_DATA_ROOT``, else a world is made. Both are
    written below the recipe's directory of runs, once.

    Raises:
        ConfigError: the environment's engine is not installed.
    """
    if tree["envgateway"] is None:
        return None
    root = os.environ.get(DATA_ROOT)
    worlds = Path(tree["run"]["dir"]).resolve() / "worlds"
    if environment == "alfworld":
        games = _games_folder(tree["envgateway"]["alfworld"]["data"], root, worlds)
        rows = {"generator": "services.common.tiny_tasks:games", "settings": {"data": str(games)}}
        return {"alfworld": {"data": str(games), "games": None}}, rows
    if environment == "webshop":
        section, num_goals = _shop(tree["envgateway"]["webshop"]["data"], root, worlds)
        rows = {"generator": "services.common.tiny_tasks:places", "settings": {"count": num_goals}}
        return {"webshop": section}, rows
    return None


def _games_folder(own: str | None, root: str | None, worlds: Path) -> Path:
    from services.envgateway.envs.alfworld.make import houses, package_data
    from services.envgateway.envs.alfworld.unpack import unpack, write_games

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
    """The gateway's section, and how many tasks there are at least. Every word counts as a noun, so no tagger's
    model is needed."""
    from services.envgateway.envs.webshop.make import write_catalogue

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
        except OSError:  # another run was quicker
            shutil.rmtree(partial_folder)
    return folder
