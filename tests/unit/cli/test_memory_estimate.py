"""The memory of a layout, estimated before any process starts: GPUs, host, /dev/shm and caches, and refused layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.check import memory as host
from services.cli.check.memory import (
    GIB,
    ModelShape,
    embedded_engine_parts,
    engine_parts,
    host_estimates,
    host_problems,
    misfits,
    shared_memory_gib,
    small_caches,
)
from services.cli.check.recipe import check_launch
from services.common.config.loading import load_recipe
from services.common.config.processes import InferenceConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

QWEN3_8B = ModelShape.by_name("Qwen/Qwen3-8B")


def test_an_engine_fills_its_share_and_needs_room_for_one_context() -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig.model_validate({"engine": "sglang", "sglang": {"memory_share": 0.8}})
    parts = engine_parts(QWEN3_8B, service, 80 * GIB, 16_384)
    assert parts["weights"] + parts["KV cache"] == pytest.approx(0.8 * 80 * GIB)
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


QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN15_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 10944, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "width"),
    [
        (QWEN3_30B, 30.53, 6144),
        ({**QWEN3_30B, "decoder_sparse_step": 2}, 30.53 - 24 * (0.6042 - 0.0377), 6144),
        ({**QWEN3_30B, "mlp_only_layers": [0, 1]}, 30.53 - 2 * (0.6042 - 0.0377), 6144),
        (MIXTRAL, 46.70, 2 * 14336),
        (QWEN15_MOE, 14.32, 4 * 1408 + 5632),
        (DEEPSEEK_MOE, 16.38, 8 * 1408),
        (GPT_OSS, 20.91, 4 * 2880),
    ],
    ids=["qwen3", "every second layer", "two dense layers", "mixtral", "qwen1.5", "deepseek", "gpt-oss"],
)
def test_the_experts_of_a_local_config_are_counted(
    tmp_path: Path, config: dict[str, object], billions: float, width: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(str(tmp_path))
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=4e-3)
    assert shape.intermediate == width, "the experts that a token passes through"


# --- memory of the host

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
VERSION = 2 * 8_190_735_360


def host_recipe(tmp_path: Path, model: str = "Qwen/Qwen3-8B", **sections: Any) -> Recipe:
    """A recipe of one policy and one service; ``weights``, ``trainer`` and ``inference`` are their keys."""
    trainer = {"compute_dtype": "bfloat16", "gpus": [0, 1, 2, 3], "num_ranks": 4, "device": "cuda"}
    trainer |= {"gradient_checkpointing": True, "token_budget": 4096}
    trainer |= sections.get("trainer", {})
    policy = {
        "model": {"path": model, "context_length": 16_384},
        "trainer": trainer,
        "weights": {"publish_dtype": "bfloat16", **sections.get("weights", {})},
        "adapter": sections.get("adapter"),
    }
    tree = {
        "name": "test",
        "extends": str(RECIPES / "quickstart" / "recipe.yaml"),
        "policies": {"model0": policy},
        "inference": {"a": {"engine": "sglang", "device": "cuda", "gpus": [4], **sections.get("inference", {})}},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return load_recipe(file, (), {})


def test_versions_and_stage_are_counted_in_shared_memory(tmp_path: Path) -> None:
    estimate = host_estimates(host_recipe(tmp_path), has_gpus=True)[0]
    assert estimate.shared == {"5 versions of model0": 5 * VERSION, "stage of a model0": VERSION}
    assert not [part for part in estimate.memory if part.startswith("mirror")], "mapped from the snapshot"
    by_vllm = host_estimates(host_recipe(tmp_path, inference={"engine": "vllm"}), has_gpus=True)[0]
    assert by_vllm.shared == estimate.shared
    full = host_estimates(host_recipe(tmp_path, weights={"transfer": "full", "keep_versions": 1}), has_gpus=True)[0]
    assert full.shared["3 versions of model0"] == 3 * VERSION
    delta = host_estimates(host_recipe(tmp_path, weights={"transfer": "delta"}), has_gpus=True)[0]
    assert delta.memory["mirror of a model0"] == VERSION


def test_shm_size_follows_from_the_recipe(tmp_path: Path) -> None:
    assert shared_memory_gib(host_recipe(tmp_path), 0) == 101  # 6 * 15.26 GiB and a tenth
    assert shared_memory_gib(host_recipe(tmp_path, model="Qwen/Qwen3-0.6B"), 0) < 10
    assert shared_memory_gib(host_recipe(tmp_path), 7) == 1, "a node without weights"


@pytest.mark.parametrize(
    ("memory_gib", "shared_gib", "told"),
    [
        (2000, 200, []),
        (20, 200, ["node 0 needs about"]),
        (2000, 64, ["/dev/shm of node 0 needs about 91.5 GiB"]),
        (20, 0, ["node 0 needs about", "/dev/shm of node 0"]),
    ],
)
def test_a_machine_with_too_little_is_told_the_figures_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gib: int, shared_gib: int, told: list[str]
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: memory_gib * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: shared_gib * GIB)
    problems = host_problems(host_recipe(tmp_path), has_gpus=True)
    assert len(problems) == len(told)
    for problem, begin in zip(problems, told, strict=True):
        assert begin in problem
        assert all(
            key in problem for key in ("weights.", "5 versions" if "/dev/shm of" in problem else "keep_versions")
        )


def test_a_machine_without_a_gpu_is_told_to_try_the_tiny_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: 200 * GIB)
    told = "this machine has 20.0 and no NVIDIA GPU: run on one that has, try the recipe with --profile tiny, or write policies."
    assert [told in problem for problem in host_problems(host_recipe(tmp_path), has_gpus=False)] == [True]
    assert not any("tiny" in problem for problem in host_problems(host_recipe(tmp_path), has_gpus=True))


def test_a_spill_directory_is_a_choice_and_small_versions_may_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: 64 << 20)  # a container's default
    assert not host_problems(host_recipe(tmp_path, weights={"spill_directory": "/mnt/nvme"}), has_gpus=True)
    assert not host_problems(load_recipe(RECIPES / "quickstart" / "recipe.yaml", (), {}), has_gpus=False)


def test_the_cache_of_an_embedded_engine_is_refused_where_it_cannot_fit(tmp_path: Path) -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig(engine="torch", dtype="bfloat16", num_slots=64)
    assert embedded_engine_parts(QWEN3_8B, service, 16_384)["KV cache"] == 8 * GIB
    enough = service.model_copy(update={"kv_cache_gib": 200.0})
    assert embedded_engine_parts(QWEN3_8B, enough, 16_384)["KV cache"] == 64 * 16_384 * 2 * 36 * 1024 * 2
    large = host_recipe(
        tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 200}
    )
    (line,) = misfits(large)
    assert "KV cache 144.0" in line and "launch.gpu_memory_gib: 80" in line
    assert all(key in line for key in ("inference.a.kv_cache_gib", "context_length", "inference.a.dtype"))
    with pytest.raises(ConfigError, match=r"KV cache 144\.0"):
        check_launch(large)
    bounded = host_recipe(
        tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 40}
    )
    assert not misfits(bounded)


def test_a_cache_that_holds_no_sequence_is_refused_with_the_least_that_does(tmp_path: Path) -> None:
    settings = {"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 2.0}
    (line,) = small_caches(host_recipe(tmp_path, inference=settings))
    assert line.startswith("inference.a, policy model0: kv_cache_gib is 2, and one sequence of 16384 tokens needs 2.26")
    assert "raise kv_cache_gib to at least 2.26, or lower policies.*.model.context_length" in line
    with pytest.raises(ConfigError, match="one sequence of 16384 tokens"):
        check_launch(host_recipe(tmp_path, inference=settings))
    assert not small_caches(host_recipe(tmp_path, inference={**settings, "kv_cache_gib": 2.27}))
    assert not small_caches(host_recipe(tmp_path, inference={**settings, "engine": "sglang"}))
    assert not small_caches(host_recipe(tmp_path, model=None, inference=settings))


@pytest.mark.parametrize("model", ["somebody/unnamed", None])
def test_a_model_of_unknown_size_is_not_estimated(tmp_path: Path, model: str | None) -> None:
    unknown = host_recipe(tmp_path, model=model)  # type: ignore[arg-type]
    assert all(not found.shared for found in host_estimates(unknown, has_gpus=True).values())
    assert shared_memory_gib(unknown, 0) == 8


def test_what_cannot_fit_is_refused_with_its_parts_and_a_remedy(tmp_path: Path) -> None:
    host_recipe(tmp_path, trainer={"gpus": [0, 1], "num_ranks": 2})

    def found(*settings: str) -> list[str]:
        with_reference = ["policies.model0.algorithm.kl_coefficient=0.001", *settings]
        return misfits(load_recipe(tmp_path / "recipe.yaml", with_reference, {}))

    (line,) = found()
    for told in ("trainer-model0", "Adam 30.5", "launch.gpu_memory_gib: 80", "trainer.offload: [optimizer"):
        assert told in line
    assert found("launch.gpu_memory_gib=141") == found("policies.model0.trainer.master_dtype=bfloat16") == []
