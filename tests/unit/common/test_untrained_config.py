"""Recipes with untrained policies: teachers, processes that are not launched, and refused settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from services.cli.plan import plan
from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

TREE: dict[str, Any] = {
    "name": "taught",
    "policies": {
        "student": {
            "model": {"path": "some/model"},
            "algorithm": {"name": "reinforce", "distillation": {"teacher": "teacher"}},
            "batch": {"dynamic_sampling": False},
        },
        "teacher": {"trained": False, "model": {"path": "larger/model"}},
    },
    "inference": {"a": {"engine": "torch"}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}


def recipe(*changes: tuple[str, Any]) -> Recipe:
    """``TREE`` with values at dotted paths."""
    tree = copy.deepcopy(TREE)
    for path, value in changes:
        *parents, last = path.split(".")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return validate(tree, source="test")


def test_a_teacher_is_served_and_neither_plays_nor_is_trained() -> None:
    taught = recipe()
    assert taught.teachers == {"student": "teacher"}
    assert list(taught.trained_policies) == taught.playing_policies == ["student"]
    assert taught.compositions() == [()]
    assert recipe(("rollout.policies", "apart")).compositions() == [("student",)]


def test_only_what_is_trained_has_a_trainer_a_publisher_and_their_ports() -> None:
    """Both sections have the same default ports, which two trainers could not share."""
    taught = recipe(("run.id", "x"))
    names = [spec.name for spec in plan(taught, Path("runs/x"))]
    assert [name for name in names if name.startswith("trainer")] == ["trainer-student"]
    assert not [where for where, _ in taught.ports() if where.startswith("policies.teacher")]
    assert "policies.teacher.weights.host" not in taught.hosts
    assert not {"trainer-teacher", "publisher-teacher"} & set(taught.processes_with_metrics())


def test_a_partner_that_is_not_trained_plays() -> None:
    partner = recipe(("policies.student.algorithm", {"name": "reinforce"}))
    assert partner.teachers == {} and partner.playing_policies == ["student", "teacher"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("policies.student.algorithm.distillation.teacher", "org/big")], ("'org/big'", "teacher_model")),
        ([("policies.teacher.trained", True)], ("policies.teacher.trained: false",)),
        ([("policies.student.algorithm.distillation.teacher_model", "m")], ("one teacher", "teacher_model")),
        ([("policies.student.algorithm.distillation", {})], ("one teacher", "teacher_model")),
        ([("policies.teacher.model.context_length", 2048)], ("(2048)", "policies.teacher.model.context_length")),
        ([("sampling.top_p", 0.9)], ("top_p", "teacher_model")),
        ([("inference.a.engine", "sglang")], ("inference.a.engine torch", "teacher_model")),
        ([("inference.a.engine", "vllm")], ("the vllm engine", "inference.a.engine torch")),
        (
            [("rollout.policies", "apart"), ("inference.a.policies", ["student"]), ("inference.b.policies", ["teacher"]),
             ("inference.b.port", 0)],
            ("inference.a.policies", "'teacher'"),
        ),
        ([("policies.student.trained", False)], ("run.steps", "trained is false for each of")),
    ],
)  # fmt: skip
def test_what_cannot_be_taught_is_told_by_key_and_remedy(changes: list[tuple[str, Any]], said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(*changes)
    for expected in said:
        assert expected in caught.value.message


def test_a_teacher_may_be_evaluated() -> None:
    evaluated = recipe(("evaluation.policies", ["teacher"]), ("run.steps", 0))
    assert evaluated.evaluation_compositions() == [("teacher",)]
