"""``rollmill run --resume RUN --set a.b=c``: changes settings of a run that is to continue.

A setting may change when the run's records stay true without it: the journal, the batches that are recorded and replayed,
the checkpoints and the order of tasks. The others are refused with the reason. A setting of the training step, such as
the learning rate, may change when the newest checkpoint is of the newest step, as after Ctrl-C; ``recipe.changes.jsonl`` in the run's directory keeps the former values.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.inspect.checkpoints import Recorded
from services.cli.inspect.standing import NOT_BEGUN, Standing, standing
from services.cli.plan.specs import with_free_ports
from services.common import run_files
from services.common.config.reading.loading import apply_override, save_resolved, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

# Pattern of a setting's path -> the reason for which it cannot change. The first that fits counts.
_FIXED = {
    "name": "it is the name of the run",
    "run.id": "it is the name of the run's directory",
    "run.dir": "the run lies there: move its directory and name the new place instead",
    "run.seed": "tasks and rollouts of the run were drawn with it",
    "run.deterministic": "what is recorded was played with or without it",
    "run.lockstep": "versions were published with or without it",
    "warm_start.*": "the starting checkpoint was made with it",
    "policies.*.model.*": "the checkpoints of the run are of this model and its context",
    "policies.*.adapter*": "the checkpoints of the run have, or lack, it",
    "policies.*.trained": "the journal has a ledger for each trained policy",
    "policies.*.algorithm.name": "recorded batches are replayed with the loss that trained them",
    "policies.*.algorithm.advantage": "recorded groups carry statistics of it",
    "policies.*.algorithm.value_head*": "the checkpoints of the run have, or lack, its weights",
    "policies.*.algorithm.distillation*": "recorded sequences have, or lack, the teacher's scores",
    "policies.*.trainer.master_dtype": "the checkpoints of the run have this type",
    "policies.*.weights.publish_dtype": "published versions have this type",
    "policies.*.weights.digest": "published versions have digests of this kind",
    "policies.*.batch.max_staleness": "",
    "policies.*.batch.max_token_age": "",
    "policies.*.batch.late*": "",
    "policies.*.batch.*": "recorded batches were made by it",
    "sampling.max_new_tokens": "",
    "sampling.*": "recorded log-probabilities are of tokens that were drawn with it",
    "rollout.group_size": "task groups of the run have this many rollouts",
    "rollout.policies": "task groups of the run were played so",
    "data.*.path": "",
    "data.*.columns*": "",
    "data.*.max_prompt_tokens": "",
    "data.*": "the order of the run's tasks follows from it",
    "evaluation.samplings*": "evaluations of the run are compared with each other",
    "evaluation.policies": "evaluations of the run are compared with each other",
    "security.*": "the run's keys were made for it",
}
# Settings that change the bits of a training step: those since the newest checkpoint are trained again, and must give the
# versions that are published (their digests are in the ledger, and a replica takes no other).
_OF_A_STEP = ("policies.*.optimizer.*", "policies.*.algorithm.*", "policies.*.batch.*", "policies.*.trainer.*")
_OF_NO_STEP = ("policies.*.trainer.checkpoint_every", "policies.*.trainer.keep_checkpoints", "policies.*.trainer.*port",
               "policies.*.trainer.max_mismatch")  # fmt: skip


def with_changes(
    recipe: Recipe, run_dir: Path, overrides: Sequence[str]
) -> tuple[Recipe, dict[str, tuple[object, object]]]:
    """The recipe of a run with overrides, and the settings that change: path -> (former value, new value). Writes nothing.

    Raises:
        ConfigError: an override is not valid, or changes what may not change, with one line for each.
    """
    tree = recipe.model_dump(mode="json")
    before = dict(leaves(tree))
    for override in overrides:
        apply_override(tree, override)
    found = standing(run_dir)
    wanted = dict(leaves(tree))
    touched = [path for path in sorted(before.keys() | wanted.keys()) if before.get(path) != wanted.get(path)]
    begun = found.state != NOT_BEGUN
    refused = [f"{path} cannot change in a run: {why}" for path in touched if (why := _why_fixed(path, begun))]
    if (again := _trained_again(recipe, found)) and not refused:
        refused = [f"{path} cannot change now: {again}" for path in touched if _changes_steps(path, recipe)]
    if refused:
        raise ConfigError(
            f"{run_dir} keeps these settings:\n"
            + "\n".join(f"  {line}" for line in refused)
            + "\n  Start another run for them"
        )
    changed = with_free_ports(validate(tree, source=str(run_dir)))
    newest = max(found.steps.values(), default=0)
    if changed.run.steps < newest:
        raise ConfigError(
            f"run.steps is {changed.run.steps}, and {run_dir} has trained {newest} steps: write {newest} or more"
        )
    after = dict(leaves(changed.model_dump(mode="json")))
    changes = {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    return changed, changes


def _changes_steps(path: str, recipe: Recipe) -> bool:
    """Whether a setting changes the result of a training step."""
    if path == "run.steps":  # the schedules of optimizers span the run
        optimizers = [policy.optimizer for policy in recipe.trained_policies.values()]
        return any(each.schedule != "constant" and each.total_updates is None for each in optimizers)
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in _OF_NO_STEP):
        return False
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in _OF_A_STEP)


def _trained_again(recipe: Recipe, found: Standing) -> str:
    """Why no training step may change, if a launch would train recorded batches again; else empty."""
    for policy in recipe.trained_policies:
        durable = found.checkpoints.get(policy, 0)
        published = Recorded.read(found.run_dir, policy, after=sys.maxsize).newest_version
        again = max(published, found.steps.get(policy, 0)) - durable
        if again > 0:
            return (
                f"{again} steps of {policy} after its newest checkpoint ({f'step {durable}' if durable else 'there is none'}) are "
                "trained again, and must give the versions that are published. Go on without this change, interrupt with "
                "Ctrl-C, which writes a checkpoint, and change it then"
            )
    return ""


def save_changes(recipe: Recipe, run_dir: Path, changes: dict[str, tuple[object, object]]) -> None:
    """Write the changed recipe, and note what changed."""
    with run_files.changes(run_dir).open("a") as file:
        for path, (former, new) in changes.items():
            file.write(json.dumps({"time": time.time(), "setting": path, "from": former, "to": new}) + "\n")
    save_resolved(recipe, run_dir)


def _why_fixed(path: str, begun: bool) -> str:
    """The reason for which a setting keeps its value; empty where it may change. Before the run has begun, its name and place
    alone are fixed."""
    for pattern, why in _FIXED.items():
        if fnmatch.fnmatchcase(path, pattern):
            return why if begun or pattern in ("name", "run.id", "run.dir") else ""
    return ""


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting of a tree; an empty mapping is a value."""
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
