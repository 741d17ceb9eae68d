"""``--profile tiny``: runs any recipe on two CPU cores in minutes, as a trial before a run of days.

    swapped    models for random ones of the same architecture, made on the spot; sampling for scripted answers of the
               replay engine (``engine: forced``), of which half are right, with real log-probabilities and versions
    shrunk     steps, batches, groups, contexts and budgets, evaluation; rows to a few, of those that lie on this machine
    freed      ports, hosts, nodes, devices: everything on this machine's CPU, on free ports, in float32
    kept       workflows, rewards, filters, losses, optimizers, environments, weight transfer, and which services there are

Budgets are set rather than lowered: they count tokens, and a tiny tokenizer needs about twice as many as a real one. The data
of this machine are found here: rows of a dataset or of a similar one, and the files of an environment's world, made if
needed.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.loading import Profile, load_recipe
from services.common.config.reading.unread import unread_variables
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInWorkflow
from services.common.errors import ConfigError, DatasetError
from services.common.extras import load_extra, provided
from services.orchestrator.tasks.code_rows import code_row
from services.orchestrator.tasks.math_rows import math_row
from services.orchestrator.tasks.rows import known, local_file

Tree = dict[str, Any]
FindRows = Callable[[Mapping[str, Any]], Mapping[str, Any]]
World = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Any]]  # sections of the gateway by name, and the dataset
FindWorld = Callable[[str, Mapping[str, Any]], World | None]

STEPS = 3
TRAIN_ROWS, EVALUATION_ROWS, EVALUATION_SAMPLES = 64, 2, 2
BATCH_SIZE, EPISODE_BATCH_SIZE = 16, 8  # episodes are long
CONTEXT_TOKENS, EPISODE_CONTEXT_TOKENS = 4096, 8192
PROMPT_TOKENS = 2560
_TURN = {"max_new_tokens": 1024, "min_new_tokens": 0}
_LISTENING = {"host": "127.0.0.1", "port": 0}
# Sections, where `*` is any name, with the values that they get.
SET: dict[str, Tree] = {
    "run": {"resume": "never"},
    "sampling": _TURN,
    "evaluation.samplings.*": _TURN,
    "orchestrator": _LISTENING,
    "inference.*": _LISTENING
    | {"engine": "forced", "device": "cpu", "dtype": "float32", "threads": 1, "node": 0, "gpus": [], "engines": {}},
    "policies.*.trainer": {"port": 0, "num_ranks": 1, "nodes": [0], "rendezvous_port": 0, "interface": ""}
    | {"gpus": [], "offload": [], "attention": "auto", "device": "cpu", "threads": 1}
    | {"master_dtype": "float32", "compute_dtype": "float32"},
    "policies.*.weights": {"port": 0, "spill_directory": None, "publish_dtype": "float32"},
    "envgateway": _LISTENING | {"node": 0},
    "envgateway.queue": {"redis_uri": ""},  # judged here: workers elsewhere know nothing of this run
}
# Numbers that are lowered to these.
AT_MOST: dict[str, Mapping[str, float]] = {
    "run": {"steps": STEPS},
    "rollout": {"group_size": 4, "timeout_s": 120.0},
    "evaluation": {"every": STEPS - 1, "samples_per_task": EVALUATION_SAMPLES},  # at least once, unless it is off
    "policies.*.batch": {"minibatches": 4, "max_staleness": 2},
    "policies.*.trainer": {"token_budget": 2 * CONTEXT_TOKENS, "checkpoint_every": STEPS - 1},
    "policies.*.weights": {"full_every": STEPS - 1},  # both ways are then taken
    "inference.*": {"num_slots": 16},
    "envgateway.sandbox": {"num_slots": 2},
    "envgateway.math": {"num_workers": 1},
    "envgateway.*.engine": {"num_workers": 2},  # for two cores: each new game would start another process
}


def tiny(tree: Mapping[str, Any], find_rows: FindRows, find_world: FindWorld) -> Tree:
    """The tree of a validated recipe, made small; the given one stays as it is.

    ``find_rows`` turns a dataset's section into that of rows that lie here. ``find_world`` gives, for the name of an
    environment, what the gateway's section needs to offer it here and the dataset of its tasks with experts; None where
    the recipe's own are to be taken.
    """
    made: Tree = copy.deepcopy(dict(tree))
    episodes = made["workflow"]["name"] == BuiltInWorkflow.AGENT_ENV
    made["name"] = f"{made['name']}-tiny"
    for path, settings in SET.items():
        for section in _sections(made, path):
            section |= settings
    for path, limits in AT_MOST.items():
        for section in _sections(made, path):
            section |= {key: min(section[key], most) for key, most in limits.items()}
    for section in _sections(made, "envgateway.*"):
        if section.get("port") is not None:
            section["port"] = 0
    made["warm_start"] = {name: _warm_start(policy) for name, policy in tree["policies"].items()}
    for policy in made["policies"].values():
        policy["model"] |= {"path": None, "context_length": EPISODE_CONTEXT_TOKENS if episodes else CONTEXT_TOKENS}
        batch = policy["batch"]
        batch["size"] = min(batch["size"], EPISODE_BATCH_SIZE if episodes else BATCH_SIZE)
        if batch["resample"] is not None:
            kept = batch["resample"]["keep"] * made["rollout"]["group_size"] // tree["rollout"]["group_size"]
            batch["resample"]["keep"] = max(2, kept)
    rows_of_world: Mapping[str, Any] = {}
    if episodes and (world := find_world(made["workflow"]["settings"].get("environment", ""), made)) is not None:
        for name, here in world[0].items():
            made["envgateway"][name] |= here
        rows_of_world = {"path": None, "name": None, "subset": None, "id_field": "id", **world[1]}

    def few(dataset: Mapping[str, Any], limit: int) -> Tree:
        found = dict(find_rows({**dataset, **rows_of_world}))
        found["limit"] = min(found["limit"] or limit, limit)
        if found["max_prompt_tokens"] is not None:
            found["max_prompt_tokens"] = PROMPT_TOKENS
        if found["samples_per_task"] is not None:
            found["samples_per_task"] = min(found["samples_per_task"], EVALUATION_SAMPLES)
        return found

    data = made["data"]
    train = data["train"]
    data["train"] = [few(rows, TRAIN_ROWS) for rows in train] if isinstance(train, list) else few(train, TRAIN_ROWS)
    data["evaluation"] = {name: few(rows, EVALUATION_ROWS) for name, rows in data["evaluation"].items()}
    return made


def _sections(tree: Tree, path: str) -> list[Tree]:
    """The sections at a path, of which `*` is any name; none for one that is null."""
    found = [tree]
    for part in path.split("."):
        below = [inner for one in found for inner in (one.values() if part == "*" else [one.get(part)])]
        found = [inner for inner in below if isinstance(inner, dict)]
    return found


def _warm_start(policy: Mapping[str, Any]) -> Tree:
    """A model without training, of the architecture that the name of the recipe's model implies."""
    name = str(policy["model"]["path"] or "").lower()
    kind = "qwen2" if "qwen2" in name or "qwen1.5" in name else "qwen3"
    return {"builder": "services.common.tiny:build", "builder_settings": {"kind": kind}, "steps": 0}


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
    if name != "tiny":
        raise ConfigError(f"there is no profile {name!r}; write one of tiny")
    return partial(tiny, find_rows=find_rows, find_world=find_world)
