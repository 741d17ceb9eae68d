"""The type of versions follows from the trainer's, and the bound of the comparison from the coarsest type."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe


def recipe(trainer: dict[str, Any], weights: dict[str, Any], *inference: dict[str, Any]) -> Recipe:
    services = {f"a{i}": {"port": 0, **service} for i, service in enumerate(inference or ({},))}
    policy = {"model": {"path": "./m"}, "trainer": trainer, "weights": weights}
    tree = {"name": "r", "policies": {"p": policy}, "data": {"train": {"path": "tasks.jsonl"}}, "inference": services}
    return validate({**tree, "evaluation": {"at_start": False, "at_end": False}}, source="test")


CPU: dict[str, Any] = {"device": "cpu"}
GPU: dict[str, Any] = {"device": "cuda"}


@pytest.mark.parametrize(
    ("trainer", "weights", "published"),
    [
        (CPU, {}, "float32"),
        (GPU, {}, "bfloat16"),
        (GPU | {"compute_dtype": "float32"}, {}, "float32"),
        (CPU, {"publish_dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "bfloat16"),  # no process knows the device of another
    ],
)
def test_versions_have_the_type_in_which_the_trainer_computes(
    trainer: dict[str, Any], weights: dict[str, Any], published: str
) -> None:
    made = recipe(trainer, weights)
    assert made.policies["p"].published_dtype == published
    saved = Recipe.model_validate(made.model_dump(mode="json"))
    assert saved.policies["p"].published_dtype == published
    for has_gpu in (False, True):  # processes that are started one by one agree whatever each finds
        assert made.with_devices(has_gpu=has_gpu).policies["p"].published_dtype == published


def test_a_run_on_one_machine_publishes_as_its_trainer_computes() -> None:
    for has_gpu, published in ((False, "float32"), (True, "bfloat16")):
        assert recipe({}, {}).with_devices(has_gpu=has_gpu, node=0).policies["p"].published_dtype == published


@pytest.mark.parametrize(
    ("trainer", "weights", "inference", "bound"),
    [
        (CPU, {}, [CPU], 1e-3),
        (CPU, {}, [CPU | {"engine": "forced"}], 1e-3),
        (CPU, {"publish_dtype": "bfloat16"}, [CPU], 0.05),
        (CPU, {}, [CPU, CPU | {"dtype": "bfloat16"}], 0.05),
        (CPU, {}, [CPU, CPU | {"dtype": "bfloat16", "policies": ["other"]}], 1e-3),
        (GPU, {}, [GPU], 0.05),
        (CPU, {}, [CPU | {"engine": "sglang"}], 0.05),
        (CPU, {}, [CPU | {"engine": "my_engine:Engine"}], 0.05),
        ({}, {}, [{}], 0.05),
        (CPU, {}, [CPU | {"engine": "scripted"}], math.inf),
    ],
)
def test_the_coarsest_type_decides_the_bound(
    trainer: dict[str, Any], weights: dict[str, Any], inference: list[dict[str, Any]], bound: float
) -> None:
    made = recipe(trainer, weights, *[{k: v for k, v in s.items() if k != "policies"} for s in inference])
    if inference[-1].get("policies"):  # another policy's
        others = dict(made.inference)
        others["a1"] = others["a1"].model_copy(update={"policies": ["other"]})
        made = made.model_copy(update={"inference": others})
    assert made.numerics("p")[0] == bound
