"""GPUs of a recipe: inconsistent settings are refused with the key and the correction, and variables set the GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.plan import plan
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError

TWO_POLICIES: dict[str, Any] = {
    "name": "placed",
    "defaults": {
        "policies": {"model": {"path": "some/Qwen3-8B"}, "trainer": {"num_ranks": 2}},
        "inference": {"engine": "sglang"},
    },
    "policies": {
        "model0": {"trainer": {"gpus": [4, 5], "port": 1}, "weights": {"port": 2}},
        "model1": {"trainer": {"gpus": [6, 7], "port": 3}, "weights": {"port": 4}},
    },
    "inference": {"a": {"gpus": [0, 1, 2, 3], "engines": {"model0": 3, "model1": 1}}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(TWO_POLICIES))
    return path


def test_each_process_sees_exactly_its_gpus(recipe: Path) -> None:
    seen = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in plan(load_recipe(recipe, (), {}), Path("run"))}
    assert seen == {
        "orchestrator": None,
        "envgateway": None,
        "inference-a": "0,1,2,3",
        "trainer-model0": "4,5",
        "trainer-model1": "6,7",
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["policies.model1.trainer.gpus=[5, 6]"],
            ("policies.model1.trainer.gpus", "policies.model0.trainer.gpus", "5"),
        ),
        (["policies.model0.trainer.gpus=[4]"], ("1 GPUs for 2 ranks", "num_ranks: 1")),
        (["policies.model0.trainer.gpus=[4, 4]"], ("policies.model0.trainer.gpus", "twice")),
        (["policies.model0.trainer.device=cpu"], ("policies.model0.trainer", "device is cpu")),
        (["inference.a.engines={model0: 3, model1: 2}"], ("take 5 GPUs", "inference.a.gpus has 4", "write 5")),
        (["inference.a.engines={}"], ("inference.a.engines: {model0: 2, model1: 2}",)),
        (["inference.a.engines={model0: 4}"], ("inference.a.engines leaves out model1",)),
        (["inference.a.engines={model0: 3, model2: 1}"], ("model2", "does not serve", "model1")),
        (["inference.a.sglang.tensor_parallel=2"], ("take 8 GPUs", "tensor_parallel")),
        (["inference.a.engine=vllm", "inference.a.vllm.tensor_parallel=2"], ("take 8 GPUs", "vllm.tensor_parallel")),
        (["inference.a.engine=torch"], ("inference.a.engines", "one per policy", "sglang")),
        (["inference.a.engine=torch", "inference.a.engines={}"], ("inference.a.gpus", "uses one")),
        (["inference.a.engine=scripted", "inference.a.engines={}"], ("inference.a.gpus", "uses no GPU")),
        (["inference.a.gpus=[0, 0, 1, 2]"], ("inference.a.gpus", "twice")),
        (["inference.a.gpus=[-1]"], ("inference.a.gpus.0", "greater than or equal to 0")),
        (["policies.model0.trainer.rendezvous_port=1"], ("policies.model0.trainer.rendezvous_port", "are both 1")),
    ],
)
def test_what_does_not_add_up_is_refused_with_what_to_write(
    recipe: Path, settings: list[str], told: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, settings, {})
    for expected in told:
        assert expected in caught.value.message


def test_the_same_gpu_of_another_node_is_another_gpu(recipe: Path) -> None:
    elsewhere = ["inference.b={port: 9, node: 1, gpus: [0, 1], engines: {model0: 1, model1: 1}}"]
    loaded = load_recipe(recipe, elsewhere, {})
    assert [spec.name for spec in plan(loaded, Path("run"), node=1)] == ["inference-b"]
    assert "inference-b" not in {spec.name for spec in plan(loaded, Path("run"))}


def test_several_ranks_meet_at_the_port_of_the_recipe(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["policies.model0.trainer.rendezvous_port=29541"], {})
    argv = {spec.name: spec.argv for spec in plan(loaded, Path("run"))}
    assert "--rendezvous-port=29541" in argv["trainer-model0"] and "--num-ranks=2" in argv["trainer-model0"]
    assert not [part for part in argv["trainer-model1"] if part.startswith("--rendezvous")]


def test_variables_give_gpus_and_ranks(recipe: Path) -> None:
    environment = {"INFERENCE_A_GPUS": "3,2,1,0", "TRAINER_MODEL0_GPUS": "4", "TRAINER_MODEL1_GPUS": "5, 6,7"}
    loaded = load_recipe(recipe, (), environment)
    assert loaded.inference["a"].gpus == [3, 2, 1, 0]
    assert [(p.trainer.gpus, p.trainer.num_ranks) for p in loaded.policies.values()] == [([4], 1), ([5, 6, 7], 3)]


def test_a_variable_without_a_name_is_that_of_the_only_section(recipe: Path) -> None:
    assert load_recipe(recipe, (), {"INFERENCE_GPUS": "0,1,2,3"}).inference["a"].gpus == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"TRAINER_GPUS does not name .* TRAINER_MODEL0_GPUS and TRAINER_MODEL1_GPUS"):
        load_recipe(recipe, (), {"TRAINER_GPUS": "4,5"})


@pytest.mark.parametrize("text", ["", "0,,1", "a", "0-3"])
def test_a_variable_that_lists_no_gpus_is_refused(recipe: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"INFERENCE_A_GPUS is .* such as 0,1"):
        load_recipe(recipe, (), {"INFERENCE_A_GPUS": text})


def test_one_policy_without_numbers_of_engines_gets_all_gpus(recipe: Path) -> None:
    alone = ["inference.b={port: 9, policies: [model1], gpus: [8, 9, 10, 11], sglang: {tensor_parallel: 2}}"]
    load_recipe(recipe, alone, {})
    with pytest.raises(ConfigError, match="has 3: write 2 GPUs there"):
        load_recipe(recipe, [alone[0].replace(", 11]", "]")], {})
