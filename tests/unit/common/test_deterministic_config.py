"""``run.deterministic`` refuses every nondeterministic setting, with the correction."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.errors import ConfigError

TREE: dict[str, Any] = {
    "name": "repeatable",
    "run": {"deterministic": True},
    "policies": {
        "model0": {"model": {"path": "some/model"}, "batch": {"max_staleness": 0}, "trainer": {"device": "cpu"}}
    },
    "inference": {"a": {"engine": "torch", "device": "cpu"}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}


def tree(**changes: Any) -> dict[str, Any]:
    """``TREE`` with values at dotted paths, '__' for the dot."""
    made = copy.deepcopy(TREE)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = made
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return made


def test_a_synchronous_run_on_one_core_per_process_is_accepted() -> None:
    assert validate(tree(), source="test").run.deterministic
    assert validate(tree(inference__a__engine="scripted", inference__a__device="auto"), source="test")
    assert validate(tree(inference__b={"engine": "forced", "device": "cpu", "port": 0}), source="test")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("policies__model0__batch__max_staleness", 1, "policies.model0.batch.max_staleness is 1: write 0"),
        ("policies__model0__batch__replay", {"ratio": 0.5}, "batch.replay.ratio is 0.5: write 0"),
        ("policies__model0__trainer__device", "auto", "trainer.device is auto: write cpu"),
        ("policies__model0__trainer__num_ranks", 2, "trainer.num_ranks is 2: write 1"),
        ("policies__model0__trainer__threads", 4, "trainer.threads is 4: write 1"),
        ("policies__other", {"model": {"path": "another/model"}, "trainer": {"port": 0}}, "policies has model0, other"),
        ("inference__a__engine", "sglang", "inference.a.engine is sglang"),
        ("inference__a__device", "cuda", "inference.a.device is cuda: write cpu"),
        ("inference__a__threads", 2, "inference.a.threads is 2: write 1"),
        ("workflow__name", "actor_verifier", "workflow.name is actor_verifier"),
        ("data__curation", "greso", "data.curation is greso"),
        ("run__until", {"evaluation": "greedy", "at_least": 0.5}, "run.until ends training"),
    ],
)
def test_what_cannot_hold_is_refused_with_its_key_and_value(path: str, value: Any, said: str) -> None:
    changes = {path: value}
    if path == "policies__other":
        changes["policies__other"] = {**value, "weights": {"port": 0}}
    if path == "run__until":
        changes |= {"data__evaluation": {"held_out": {"path": "tasks.jsonl"}}, "evaluation__every": 1}
    with pytest.raises(ConfigError) as refused:
        validate(tree(**changes), source="test")
    assert "run.deterministic cannot hold" in refused.value.message and said in refused.value.message
    undetermined = tree(**changes)
    undetermined["run"]["deterministic"] = False
    assert validate(undetermined, source="test")


def test_all_of_them_are_named_at_once() -> None:
    changed = tree(policies__model0__batch__max_staleness=2, inference__a__threads=3, data__curation="filter_solved")
    with pytest.raises(ConfigError) as refused:
        validate(changed, source="test")
    assert all(key in refused.value.message for key in ("max_staleness is 2", "threads is 3", "data.curation"))
