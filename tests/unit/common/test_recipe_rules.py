"""Rules between the sections of a recipe: what follows from others, and what is refused with its key and the remedy."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.cli.plan import plan
from services.common.config.loading import set_at, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

Changes = Mapping[str, Any]  # dotted path -> value

BASE: dict[str, Any] = {
    "name": "r",
    "policies": {"p": {"model": {"path": "some/model"}}},
    "inference": {"a": {"engine": "torch"}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}
OTHER = {"model": {"path": "another/model"}, "trainer": {"port": 0}, "weights": {"port": 0}}
ADAPTED = {"policies.p.adapter": {"rank": 8, "alpha": 16}}
TAUGHT = {
    "policies.p.algorithm": {"name": "reinforce", "distillation": {"teacher": "teacher"}},
    "policies.p.batch.dynamic_sampling": False,
    "policies.teacher": {"trained": False, "model": {"path": "larger/model"}},
}
UNTIL = {
    "evaluation.every": 2,
    "evaluation.samplings": {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}},
    "data.evaluation": {"held_out": {"path": "x"}, "other": {"path": "x"}},
    "run.until": {"evaluation": "sampled", "at_least": 0.9},
}
APART = UNTIL | {"policies.q": OTHER, "rollout.policies": "apart"}
DETERMINISTIC = {
    "run.deterministic": True,
    "policies.p.batch.max_staleness": 0,
    "policies.p.trainer.device": "cpu",
    "inference.a.device": "cpu",
}


def recipe(changes: Changes) -> Recipe:
    """``BASE`` with these values."""
    tree = copy.deepcopy(BASE)
    for path, value in changes.items():
        set_at(tree, path.split("."), copy.deepcopy(value))
    return validate(tree, source="test")


REFUSED: list[tuple[Changes, Changes, str]] = [
    # adapters
    (ADAPTED, {"policies.p.adapter.rank": 0}, "p.adapter.rank: .*greater than or equal to 1"),
    (ADAPTED, {"policies.p.adapter": {"rank": 8}}, "p.adapter.alpha: .*(missing|required)"),
    (ADAPTED, {"policies.p.adapter.alpha": 0}, "p.adapter.alpha: .*greater than 0"),
    (ADAPTED, {"policies.p.adapter.dropout": 0.1}, "p.adapter.dropout: unknown key"),
    (ADAPTED, {"policies.p.adapter.targets": []}, "targets is empty: name modules, such as q_proj"),
    (ADAPTED, {"policies.p.adapter.targets": ["q_proj", "q_proj"]}, "'q_proj' more than once"),
    (ADAPTED, {"policies.p.adapter.targets": "all"}, "all-linear"),
    (ADAPTED, {"policies.p.weights.transfer": "delta"}, "weights.transfer is delta, and adapter is set: .*write transfer: full"),
    (ADAPTED, {"policies.p.weights.full_every": 10}, "full_every is 10, and adapter is set: .* leave full_every out"),
    (ADAPTED, {"policies.p.trainer.offload": ["optimizer"]}, "trainer.offload has optimizer, and adapter is set"),
    (ADAPTED, {"policies.p.trainer.offload": ["reference"]}, "trainer.offload has reference, and adapter is set: .* without its"),
    (ADAPTED, {"policies.p.trained": False}, "adapter is set, and trained is false"),
    (ADAPTED, {"inference.a.engine": "mine.engine:Mine"}, "'mine.engine:Mine', which serves no adapters"),
    (ADAPTED, {"inference.a.engine": "vllm"}, "which serves no adapters: write inference.a.engine torch or sglang"),
    (ADAPTED, {"inference.a": {"engine": "sglang", "kv_policy": "keep"}}, "kv_policy is keep, and .* write recompute"),
    (ADAPTED, {"inference.a": {"engine": "sglang", "sglang": {"update": "tensors"}}}, "update is tensors, and .* write disk"),
    # teachers
    (TAUGHT, {"policies.p.algorithm.distillation.teacher": "org/big"}, "'org/big', .*teacher_model"),
    (TAUGHT, {"policies.teacher.trained": True}, "policies.teacher.trained: false"),
    (TAUGHT, {"policies.p.algorithm.distillation.teacher_model": "m"}, "one teacher: .*teacher_model"),
    (TAUGHT, {"policies.p.algorithm.distillation": {}}, "one teacher: .*teacher_model"),
    (TAUGHT, {"policies.teacher.model.context_length": 2048}, r"policies.teacher.model.context_length \(2048\)"),
    (TAUGHT, {"sampling.top_p": 0.9}, "top_p 0.9, .*teacher_model"),
    (TAUGHT, {"inference.a.engine": "sglang"}, "the sglang engine .*inference.a.engine torch, .*teacher_model"),
    (TAUGHT, {"rollout.policies": "apart", "inference.a.policies": ["p"], "inference.b": {"policies": ["teacher"], "port": 0}},
     "inference.a.policies has 'p' without its teacher 'teacher'"),
    (TAUGHT, {"policies.p.trained": False}, "run.steps is .*trained is false for each of"),
    # the end of training by an evaluation
    *((UNTIL, {"run.until.at_least": number}, "finite") for number in (math.nan, math.inf, -math.inf)),
    (UNTIL, {"run.until.evaluation": "samplde"}, "'samplde'.*greedy.*sampled"),
    (UNTIL, {"run.until.dataset": "heldout"}, "'heldout'.*held_out.*other"),
    (UNTIL, {"run.until.metric": "accuracy"}, "'accuracy'"),
    (UNTIL, {"run.until.metric": "pass@0"}, "'pass@0'"),
    (UNTIL, {"run.until.metric": "pass@2"}, "1 samples of a task"),
    (UNTIL, {"run.until.metric": "pass@3", "evaluation.samples_per_task": 4}, "power"),
    *((UNTIL, {"run.until.metric": "pass@1", "run.until.at_least": share}, "share") for share in (0.0, -0.5, 1.5)),
    (UNTIL, {"run.until.in_a_row": 0}, "in_a_row"),
    (UNTIL, {"run.until.at_least": {}}, "names no policy"),
    (UNTIL, {"run.until.at_least": {"p": 0.5}}, "play together"),
    (UNTIL, {"evaluation.every": 0}, r"evaluation\.every is 0"),
    (UNTIL, {"evaluation.during_samplings": ["greedy"]}, "during_samplings"),
    ({}, {"evaluation.during_samplings": ["samplde"]}, "during_samplings names 'samplde'"),
    (APART, {"run.until.at_least": {"p": 0.9}}, "at_least"),
    (APART, {"run.until.at_least": {"p": 0.9, "c": 0.5}}, "at_least"),
    # deterministic runs
    (DETERMINISTIC, {"policies.p.batch.max_staleness": 1}, "policies.p.batch.max_staleness is 1: write 0"),
    (DETERMINISTIC, {"policies.p.batch.replay.ratio": 0.5}, "batch.replay.ratio is 0.5: write 0"),
    (DETERMINISTIC, {"policies.p.trainer.device": "auto"}, "trainer.device is auto: write cpu"),
    (DETERMINISTIC, {"policies.p.trainer.num_ranks": 2}, "trainer.num_ranks is 2: write 1"),
    (DETERMINISTIC, {"policies.p.trainer.threads": 4}, "trainer.threads is 4: write 1"),
    (DETERMINISTIC, {"policies.other": OTHER}, "policies has p, other"),
    (DETERMINISTIC, {"inference.a.engine": "sglang"}, "inference.a.engine is sglang"),
    (DETERMINISTIC, {"inference.a.device": "cuda"}, "inference.a.device is cuda: write cpu"),
    (DETERMINISTIC, {"inference.a.threads": 2, "data.curation": "greso"}, "data.curation is greso.*inference.a.threads is 2: write 1"),
    (DETERMINISTIC, {"workflow.name": "actor_verifier"}, "workflow.name is actor_verifier"),
    (DETERMINISTIC, UNTIL, "run.until ends training"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "changes", "told"), REFUSED)
def test_what_does_not_go_together_is_refused_with_key_and_remedy(
    section: Changes, changes: Changes, told: str
) -> None:
    recipe(section)
    with pytest.raises(ConfigError) as refused:
        recipe({**section, **changes})
    assert re.search(told, refused.value.message), refused.value.message
    if section is DETERMINISTIC:
        assert "run.deterministic cannot hold" in refused.value.message
        recipe({**section, **changes, "run.deterministic": False})


def test_an_adapter_is_published_in_full_and_targets_all_linear_modules() -> None:
    found = recipe(ADAPTED)
    section = found.policies["p"]
    assert section.adapter is not None and section.adapter.targets == "all-linear"
    assert section.weights.transfer == "full" and recipe({}).policies["p"].weights.transfer == "auto"
    assert validate(found.model_dump(mode="json"), source="the resolved recipe") == found
    taught = {"name": "reinforce", "distillation": {"teacher_model": "larger/model"}}
    offloaded = {"policies.p.algorithm": taught, "policies.p.batch.dynamic_sampling": False}
    recipe({**ADAPTED, **offloaded, "policies.p.trainer.offload": ["reference"]})


def test_a_teacher_is_served_and_neither_plays_nor_is_trained() -> None:
    """Both sections have the same default ports, which two trainers could not share."""
    taught = recipe(TAUGHT | {"run.id": "x"})
    assert taught.teachers == {"p": "teacher"}
    assert list(taught.trained_policies) == taught.playing_policies == ["p"]
    assert taught.compositions() == [()]
    assert recipe(TAUGHT | {"rollout.policies": "apart"}).compositions() == [("p",)]
    names = [spec.name for spec in plan(taught, Path("runs/x"))]
    assert [name for name in names if name.startswith("trainer")] == ["trainer-p"]
    assert not [where for where, _ in taught.ports() if where.startswith("policies.teacher")]
    assert "policies.teacher.weights.host" not in taught.hosts
    assert not {"trainer-teacher", "publisher-teacher"} & set(taught.processes_with_metrics())
    evaluated = recipe(TAUGHT | {"evaluation.policies": ["teacher"], "run.steps": 0})
    assert evaluated.evaluation_compositions() == [("teacher",)]
    partner = recipe(TAUGHT | {"policies.p.algorithm": {"name": "reinforce"}})
    assert partner.teachers == {} and partner.playing_policies == ["p", "teacher"]


@pytest.mark.parametrize("number", [0.9, -3.0, 40.0])
def test_a_threshold_of_a_sampling_of_the_recipe_is_taken(number: float) -> None:
    found = recipe(UNTIL | {"run.until.at_least": number}).run.until
    assert found is not None
    assert (found.threshold(), found.metric, found.in_a_row) == (number, "reward", 2)
    recipe(UNTIL | {"run.until.metric": "pass@4", "evaluation.samples_per_task": 4, "run.until.at_least": 0.9})


def test_policies_that_play_apart_may_each_have_their_own_threshold() -> None:
    found = recipe(APART | {"run.until.at_least": {"p": 0.9, "q": 0.5}}).run.until
    assert found is not None and [found.threshold(policy) for policy in "pq"] == [0.9, 0.5]


def test_deterministic_runs_may_have_engines_without_a_model_and_several_services() -> None:
    assert recipe(DETERMINISTIC | {"inference.a.engine": "scripted", "inference.a.device": "auto"}).run.deterministic
    assert recipe(DETERMINISTIC | {"inference.b": {"engine": "forced", "device": "cpu", "port": 0}})


CPU, GPU = {"policies.p.trainer.device": "cpu"}, {"policies.p.trainer.device": "cuda"}


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        (CPU, "float32"),
        (GPU, "bfloat16"),
        (GPU | {"policies.p.trainer.compute_dtype": "float32"}, "float32"),
        (CPU | {"policies.p.weights.publish_dtype": "bfloat16"}, "bfloat16"),
        ({}, "bfloat16"),  # no process knows the device of another
    ],
)
def test_versions_have_the_type_in_which_the_trainer_computes(changes: Changes, published: str) -> None:
    made = recipe(changes)
    assert made.policies["p"].published_dtype == published
    assert Recipe.model_validate(made.model_dump(mode="json")).policies["p"].published_dtype == published
    for has_gpu in (False, True):  # processes that are started one by one agree whatever each finds
        assert made.with_devices(has_gpu=has_gpu).policies["p"].published_dtype == published


def test_a_run_on_one_machine_publishes_as_its_trainer_computes() -> None:
    for has_gpu, published in ((False, "float32"), (True, "bfloat16")):
        assert recipe({}).with_devices(has_gpu=has_gpu, node=0).policies["p"].published_dtype == published


ALL_CPU = CPU | {"inference.a.device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        (ALL_CPU, 1e-3),
        (ALL_CPU | {"inference.a.engine": "forced"}, 1e-3),
        (ALL_CPU | {"policies.p.weights.publish_dtype": "bfloat16"}, 0.05),
        (ALL_CPU | {"inference.b": {"port": 0, "device": "cpu", "dtype": "bfloat16"}}, 0.05),
        (GPU | {"inference.a.device": "cuda"}, 0.05),
        (ALL_CPU | {"inference.a.engine": "sglang"}, 0.05),
        (ALL_CPU | {"inference.a.engine": "my_engine:Engine"}, 0.05),
        ({}, 0.05),
        (ALL_CPU | {"inference.a.engine": "scripted"}, math.inf),
        (ALL_CPU | {"policies.q": OTHER, "rollout.policies": "apart",
                    "inference.b": {"port": 0, "device": "cpu", "dtype": "bfloat16", "policies": ["q"]}}, 1e-3),
    ],
)  # fmt: skip
def test_the_coarsest_type_decides_the_bound_of_the_comparison(changes: Changes, bound: float) -> None:
    changes = {**changes, "inference.a.policies": ["p"]} if "policies.q" in changes else changes
    assert recipe(changes).numerics("p")[0] == bound


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "xxh3-128"),
        ({"orchestrator.host": "::1", "envgateway": None}, "xxh3-128"),
        ({"orchestrator.host": "0.0.0.0"}, "blake3"),
        ({"inference.b": {"host": "10.0.0.7", "port": 0}}, "blake3"),
        ({"envgateway.host": "gateway.example"}, "blake3"),
    ],
)
def test_the_digest_withstands_forgery_where_others_reach_the_run(changes: Changes, chosen: str) -> None:
    """Trainer and replicas take the same one from the recipe."""
    assert recipe(changes).digest_algorithm() == chosen
