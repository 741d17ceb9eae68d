"""``--profile tiny``: runs any recipe on two CPU cores in minutes, as a trial before a run of days.

    swapped    models for random ones of the same architecture, made on the spot; sampling for scripted answers of the
               replay engine (``engine: forced``), of which half are right, with real log-probabilities and versions
    shrunk     steps, batches, groups, contexts and budgets, evaluation; rows to a few, of those that lie on this machine
    freed      ports, hosts, nodes, devices: everything on this machine's CPU, on free ports, in float32
    kept       workflows, rewards, filters, losses, optimizers, environments, weight transfer, and which services there are

A pure function from a recipe's tree to another; what lies on this machine is asked of its caller. Budgets are set
rather than lowered: they count tokens, and a tiny tokenizer needs about twice as many as a real one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from services.common.dataset_rows import BuiltInWorkflow

Tree = dict[str, Any]
FindRows = Callable[[Mapping[str, Any]], Mapping[str, Any]]
World = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Any]]  # sections of the gateway by name, and the dataset
FindWorld = Callable[[str, Mapping[str, Any]], World | None]

BUILDER = "services.common.tiny:build"
STEPS = 3
TRAIN_ROWS, EVALUATION_ROWS = 64, 2
EVALUATION_SAMPLES = 2
GROUP_SIZE = 4
BATCH_SIZE = 16
EPISODE_BATCH_SIZE = 8  # episodes are long
MAX_MINIBATCHES = 4
MAX_STALENESS = 2
CONTEXT_TOKENS, EPISODE_CONTEXT_TOKENS = 4096, 8192
TURN_TOKENS = 1024
PROMPT_TOKENS = 2560
NUM_SLOTS = 16
LOOPBACK = "127.0.0.1"

_QWEN2_MARKS = ("qwen2", "qwen1.5")


def tiny(tree: Mapping[str, Any], find_rows: FindRows, find_world: FindWorld) -> Tree:
    """The tree of a validated recipe, made small.

    ``find_rows`` turns a dataset's section into that of rows that lie here. ``find_world`` gives, for the name of an
    environment, what the gateway's section needs to offer it here and the dataset of its tasks with experts; None where
    the recipe's own are to be taken.
    """
    made: Tree = copy.deepcopy(dict(tree))
    episodes = made["workflow"]["name"] == BuiltInWorkflow.AGENT_ENV
    made["name"] = f"{made['name']}-tiny"
    made["run"] |= {"steps": min(made["run"]["steps"], STEPS), "resume": "never"}
    _rollouts(made)
    world = find_world(made["workflow"]["settings"].get("environment", ""), made) if episodes else None
    if world is not None:
        _move(made, world)
    _data(made, find_rows)
    _evaluation(made)
    made["warm_start"] = {name: _warm_start(policy) for name, policy in made["policies"].items()}
    for policy in made["policies"].values():
        _policy(policy, old_group=tree["rollout"]["group_size"], group=made["rollout"]["group_size"], episodes=episodes)
    for service in (made["orchestrator"], *made["inference"].values()):
        service |= {"host": LOOPBACK, "port": 0}
    for service in made["inference"].values():
        _inference(service)
    if made["envgateway"] is not None:
        _gateway(made["envgateway"])
    return made


def _rollouts(made: Tree) -> None:
    rollout = made["rollout"]
    _at_most(rollout, "group_size", GROUP_SIZE)
    _at_most(rollout, "timeout_s", 120.0)
    made["sampling"] |= {"max_new_tokens": TURN_TOKENS, "min_new_tokens": 0}


def _data(made: Tree, find_rows: FindRows) -> None:
    data = made["data"]
    _replace_train(data, lambda rows: _few(find_rows(rows), TRAIN_ROWS))
    data["evaluation"] = {name: _few(find_rows(rows), EVALUATION_ROWS) for name, rows in data["evaluation"].items()}
    train = data["train"] if isinstance(data["train"], list) else [data["train"]]
    for rows in (*train, *data["evaluation"].values()):
        if rows["max_prompt_tokens"] is not None:
            rows["max_prompt_tokens"] = PROMPT_TOKENS
        if rows["samples_per_task"] is not None:
            _at_most(rows, "samples_per_task", EVALUATION_SAMPLES)


def _replace_train(data: Tree, replaced: Callable[[Mapping[str, Any]], Tree]) -> None:
    """Replace the dataset of training, or each source where there are several."""
    train = data["train"]
    data["train"] = [replaced(rows) for rows in train] if isinstance(train, list) else replaced(train)


def _move(made: Tree, world: World) -> None:
    """Into an environment that is on this machine."""
    gateway, rows = world
    for name, section in gateway.items():
        made["envgateway"][name] |= section
    data = made["data"]
    _replace_train(data, lambda section: _replaced(section, rows))
    data["evaluation"] = {name: _replaced(section, rows) for name, section in data["evaluation"].items()}


def _replaced(dataset: Mapping[str, Any], rows: Mapping[str, Any]) -> Tree:
    return {**dataset, "path": None, "name": None, "subset": None, "id_field": "id", **rows}


def _few(dataset: Mapping[str, Any], limit: int) -> Tree:
    return {**dataset, "limit": min(dataset.get("limit") or limit, limit)}


def _evaluation(made: Tree) -> None:
    """During training at least once where the recipe evaluates then at all."""
    evaluation = made["evaluation"]
    if evaluation["every"]:
        _at_most(evaluation, "every", STEPS - 1)
    _at_most(evaluation, "samples_per_task", EVALUATION_SAMPLES)
    for sampling in evaluation["samplings"].values():
        sampling |= {"max_new_tokens": TURN_TOKENS, "min_new_tokens": 0}


def _warm_start(policy: Mapping[str, Any]) -> Tree:
    """A model without training, of the architecture that the name of the recipe's model implies."""
    name = str(policy["model"]["path"] or "").lower()
    kind = "qwen2" if any(mark in name for mark in _QWEN2_MARKS) else "qwen3"
    return {"builder": BUILDER, "builder_settings": {"kind": kind}, "steps": 0}


def _policy(policy: Tree, *, old_group: int, group: int, episodes: bool) -> None:
    policy["model"] |= {"path": None, "context_length": EPISODE_CONTEXT_TOKENS if episodes else CONTEXT_TOKENS}
    batch = policy["batch"]
    _at_most(batch, "size", EPISODE_BATCH_SIZE if episodes else BATCH_SIZE)
    _at_most(batch, "minibatches", MAX_MINIBATCHES)
    _at_most(batch, "max_staleness", MAX_STALENESS)
    if batch["resample"] is not None:
        batch["resample"]["keep"] = max(2, batch["resample"]["keep"] * group // old_group)
    policy["trainer"] |= {
        "port": 0,
        "num_ranks": 1,
        "nodes": [0],
        "gpus": [],
        "rendezvous_port": 0,
        "interface": "",
        "offload": [],
        "attention": "auto",
        "device": "cpu",
        "threads": 1,
        "master_dtype": "float32",
        "compute_dtype": "float32",
    }
    _at_most(policy["trainer"], "token_budget", 2 * CONTEXT_TOKENS)
    _at_most(policy["trainer"], "checkpoint_every", STEPS - 1)
    policy["weights"] |= {"port": 0, "spill_directory": None, "publish_dtype": "float32"}
    if policy["weights"]["full_every"]:
        _at_most(policy["weights"], "full_every", STEPS - 1)  # both ways are then taken


def _inference(service: Tree) -> None:
    service |= {"engine": "forced", "device": "cpu", "dtype": "float32", "threads": 1}
    service |= {"node": 0, "gpus": [], "engines": {}}
    _at_most(service, "num_slots", NUM_SLOTS)


def _gateway(gateway: Tree) -> None:
    gateway |= {"host": LOOPBACK, "port": 0, "node": 0}
    _at_most(gateway["sandbox"], "num_slots", 2)
    _at_most(gateway["math"], "num_workers", 1)
    gateway["queue"]["redis_uri"] = ""  # judged here: workers elsewhere know nothing of this run
    for section in gateway.values():
        if isinstance(section, dict) and "engine" in section:
            _at_most(section["engine"], "num_workers", 2)  # for two cores: each new game would start another process
        if isinstance(section, dict) and section.get("port") is not None:
            section["port"] = 0


def _at_most(section: Tree, key: str, value: float) -> None:
    section[key] = min(section[key], value)
