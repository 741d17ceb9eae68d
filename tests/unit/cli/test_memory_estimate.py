"""The memory of a layout, estimated before anything starts: what the formulas say, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from services.cli.launch_checks import check_launch
from services.cli.memory_estimate import (
    GIB,
    ModelShape,
    engine_parts,
    estimates,
    kv_bytes_per_token,
    misfits,
    trainer_rank_parts,
)
from services.common.config.loading import load_recipe
from services.common.config.losses import M2po
from services.common.config.policy import PolicyConfig, TrainerConfig
from services.common.config.services import InferenceConfig
from services.common.errors import ConfigError

QWEN3_8B = ModelShape.by_name("Qwen/Qwen3-8B")


def policy(ranks: int, dtype: str = "float32", kl: float = 0.001, offload: tuple[str, ...] = ()) -> PolicyConfig:
    return PolicyConfig(
        algorithm=M2po(kl_coefficient=kl),
        trainer=TrainerConfig.model_validate(
            {
                "num_ranks": ranks,
                "master_dtype": dtype,
                "compute_dtype": "bfloat16",
                "gradient_checkpointing": True,
                "token_budget": 17_408,
                "offload": list(offload),
            }
        ),
    )


def test_an_8b_model_on_two_ranks_needs_bfloat16_masters_on_80_gib() -> None:
    assert QWEN3_8B is not None
    whole = sum(trainer_rank_parts(QWEN3_8B, policy(2)).values())
    half = sum(trainer_rank_parts(QWEN3_8B, policy(2, "bfloat16")).values())
    four = sum(trainer_rank_parts(QWEN3_8B, policy(4)).values())
    assert half < 80 * GIB < whole and four < 80 * GIB


def test_what_is_offloaded_takes_no_gpu_memory_but_the_moments_in_flight() -> None:
    """So 8B with float32 masters and a KL reference fits on two GPUs of 80 GiB."""
    assert QWEN3_8B is not None
    whole = trainer_rank_parts(QWEN3_8B, policy(2))
    parts = trainer_rank_parts(QWEN3_8B, policy(2, offload=("optimizer", "reference")))
    assert parts["reference"] == 0
    assert parts["Adam"] == 3 * 2 * (256 << 20), "three buckets, two moments"
    assert all(parts[name] == whole[name] for name in ("weights", "gradients", "gathered", "activations", "logits"))
    assert sum(parts.values()) < 80 * GIB < sum(whole.values())
    small = ModelShape.by_name("org/thing-0.1B")
    assert small is not None
    kept, moved = (trainer_rank_parts(small, policy(1, offload=what)) for what in ((), ("optimizer",)))
    assert moved["Adam"] == kept["Adam"], "less than the buckets would take"


def test_gradient_checkpointing_keeps_one_layers_work() -> None:
    assert QWEN3_8B is not None
    section = policy(4)
    all_kept = section.model_copy(
        update={"trainer": section.trainer.model_copy(update={"gradient_checkpointing": False})}
    )
    saved, kept = (trainer_rank_parts(QWEN3_8B, p)["activations"] for p in (section, all_kept))
    # (36 layers of work) against (36 inputs of layers, and the work of one)
    work, hidden = (8 * 4096 + 4 * 12_288) * 2, 4096 * 2
    assert kept / saved == pytest.approx(36 * work / (36 * hidden + work))


def test_sharded_parts_follow_parameters_ranks_and_types() -> None:
    assert QWEN3_8B is not None
    parts = trainer_rank_parts(QWEN3_8B, policy(4))
    shard = QWEN3_8B.num_parameters * 4 / 4
    assert (parts["weights"], parts["gradients"], parts["Adam"], parts["reference"]) == (shard, shard, 2 * shard, shard)
    assert trainer_rank_parts(QWEN3_8B, policy(4, kl=0.0))["reference"] == 0
    # 17,408 tokens * (36 layers * 4096 * 2 bytes + (8 * 4096 + 4 * 12288) * 2 bytes of one layer)
    assert parts["activations"] == 17_408 * (36 * 4096 * 2 + (8 * 4096 + 4 * 12_288) * 2)


def test_an_engine_fills_its_share_and_needs_room_for_one_context() -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig.model_validate({"engine": "sglang", "sglang": {"memory_share": 0.8}})
    parts = engine_parts(QWEN3_8B, service, 80 * GIB, 16_384)
    assert parts["weights"] + parts["KV cache"] == pytest.approx(0.8 * 80 * GIB)
    assert kv_bytes_per_token(QWEN3_8B, 1) == 147_456  # 2 * 36 layers * 1024 * 2 bytes
    small = engine_parts(QWEN3_8B, service, 16 * GIB, 16_384)
    assert small["KV cache"] == 147_456 * 16_384


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.0),
        ("org/thing-1.5B-base", 1.5),
    ],
)
def test_sizes_are_read_from_names(name: str, billions: float) -> None:
    shape = ModelShape.by_name(name)
    assert shape is not None and shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["org/large", "org/model-8Bit", "gpt2"])
def test_a_name_without_a_size_is_not_guessed(name: str) -> None:
    assert ModelShape.by_name(name) is None


def test_a_local_config_is_counted(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(str(tmp_path))
    assert shape is not None and QWEN3_8B is not None
    assert shape.num_parameters == pytest.approx(QWEN3_8B.num_parameters, rel=1e-3)  # norms are left out
    assert (shape.kv_width, shape.num_layers) == (QWEN3_8B.kv_width, QWEN3_8B.num_layers)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tree = {
        "name": "placed",
        "policies": {
            "model0": {
                "model": {"path": "Qwen/Qwen3-8B"},
                "algorithm": {"kl_coefficient": 0.001},
                "trainer": {
                    "gpus": [1, 2], "num_ranks": 2, "compute_dtype": "bfloat16", "gradient_checkpointing": True,
                },
            }
        },
        "inference": {"a": {"engine": "sglang", "gpus": [0]}},
        "data": {"train": {"path": "tasks.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_what_cannot_fit_is_refused_with_its_parts_and_a_remedy(recipe: Path) -> None:
    (line,) = misfits(load_recipe(recipe, (), {}))
    for told in ("trainer-model0", "Adam 30.5", "launch.gpu_memory_gib: 80", "trainer.master_dtype: bfloat16"):
        assert told in line
    assert misfits(load_recipe(recipe, ["policies.model0.trainer.master_dtype=bfloat16"], {})) == []
    assert misfits(load_recipe(recipe, ["launch.gpu_memory_gib=141"], {})) == []


def test_an_engine_without_room_for_its_context_is_refused(recipe: Path) -> None:
    small = ["policies.model0.trainer.master_dtype=bfloat16", "inference.a.sglang.memory_share=0.19"]
    (line,) = misfits(load_recipe(recipe, small, {}))
    assert "inference-a: 1 × model0" in line and "inference.a.sglang.tensor_parallel or memory_share" in line


def test_each_process_is_estimated_on_its_own_gpus(recipe: Path) -> None:
    found = {estimate.process: estimate.gpus for estimate in estimates(load_recipe(recipe, (), {}))}
    assert found == {"trainer-model0": (1, 2), "inference-a: 1 × model0": (0,)}


def test_a_run_with_sglang_is_refused_where_the_package_is_missing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHON", sys.executable)
    loaded = load_recipe(recipe, ["policies.model0.trainer.master_dtype=bfloat16"], {})
    with pytest.raises(ConfigError, match=r"inference\.a\.engine is sglang, but the package sglang is not installed"):
        check_launch(loaded)
