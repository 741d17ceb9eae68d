"""Recipes with adapters: resolved settings, and refused ones, each with the key and the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

ADAPTER = {"rank": 8, "alpha": 16}
TREE: dict[str, Any] = {
    "name": "adapted",
    "policies": {"model0": {"model": {"path": "some/model"}, "adapter": ADAPTER}},
    "inference": {"a": {"engine": "torch"}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}


def recipe(engine: str = "torch", **policy: Any) -> Recipe:
    tree = copy.deepcopy(TREE)
    tree["policies"]["model0"] |= policy
    tree["inference"]["a"]["engine"] = engine
    return validate(tree, source="test")


def test_an_adapter_is_published_in_full_and_targets_all_linear_modules() -> None:
    found = recipe()
    section = found.policies["model0"]
    assert section.adapter is not None and section.adapter.targets == "all-linear"
    assert section.weights.transfer == "full"
    again = validate(found.model_dump(mode="json"), source="the resolved recipe")
    assert again == found
    assert recipe(adapter=None).policies["model0"].weights.transfer == "auto"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"adapter": {"rank": 0, "alpha": 16}}, r"model0.adapter.rank: .*greater than or equal to 1"),
        ({"adapter": {"rank": -4, "alpha": 16}}, r"model0.adapter.rank: .*greater than or equal to 1"),
        ({"adapter": {"rank": 8}}, r"model0.adapter.alpha: .*(missing|required)"),
        ({"adapter": {"alpha": 8}}, r"model0.adapter.rank: .*(missing|required)"),
        ({"adapter": {"rank": 8, "alpha": 0}}, r"model0.adapter.alpha: .*greater than 0"),
        ({"adapter": {"rank": 8, "alpha": 16, "dropout": 0.1}}, r"model0.adapter.dropout: unknown key"),
        ({"adapter": {"rank": 8, "alpha": 16, "targets": []}}, r"targets is empty: name modules, such as q_proj"),
        ({"adapter": {"rank": 8, "alpha": 16, "targets": ["q_proj", "q_proj"]}}, r"'q_proj' more than once"),
        ({"adapter": {"rank": 8, "alpha": 16, "targets": "all"}}, r"all-linear"),
        ({"weights": {"transfer": "delta"}}, r"weights.transfer is delta, and adapter is set: .* write transfer: full"),
        ({"weights": {"full_every": 10}}, r"weights.full_every is 10, and adapter is set: .* leave full_every out"),
        ({"trainer": {"offload": ["optimizer"]}}, r"trainer.offload has optimizer, and adapter is set"),
        ({"trainer": {"offload": ["reference"]}}, r"trainer.offload has reference, and adapter is set: .* without its"),
        ({"trained": False}, r"adapter is set, and trained is false"),
    ],
)
def test_settings_that_make_no_sense_with_an_adapter_are_refused(policy: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe(**policy)


def test_an_engine_that_serves_no_adapters_is_refused() -> None:
    says = (
        r"policies.model0.adapter is set, and the engine of inference.a is 'mine.engine:Mine', which serves no adapters"
    )
    with pytest.raises(ConfigError, match=says):
        recipe(engine="mine.engine:Mine")
    with pytest.raises(
        ConfigError, match=r"is 'vllm', which serves no adapters: write inference.a.engine torch or sglang"
    ):
        recipe(engine="vllm")


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (
            {"kv_policy": "keep"},
            r"inference.a.kv_policy is keep, and policies.model0.adapter is set: .* write recompute",
        ),
        ({"sglang": {"update": "tensors"}}, r"inference.a.sglang.update is tensors, and .* write disk"),
    ],
)
def test_ways_of_sglang_that_adapters_do_not_have_are_refused(service: dict[str, Any], says: str) -> None:
    tree = copy.deepcopy(TREE)
    tree["inference"]["a"] = {"engine": "sglang", **service}
    with pytest.raises(ConfigError, match=says):
        validate(tree, source="test")


def test_a_teacher_of_its_own_may_be_offloaded_beside_an_adapter() -> None:
    taught = {"name": "reinforce", "distillation": {"teacher_model": "larger/model"}}
    found = recipe(algorithm=taught, batch={"dynamic_sampling": False}, trainer={"offload": ["reference"]})
    assert found.policies["model0"].trainer.offload == ["reference"]
