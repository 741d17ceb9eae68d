"""The memory of a layout, estimated before any process starts: the formulas, and the refused layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from services.cli.check.memory import (
    GIB,
    ModelShape,
    engine_parts,
    misfits,
)
from services.cli.check.recipe import check_launch
from services.common.config.loading import load_recipe
from services.common.config.processes import InferenceConfig
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


def test_a_layout_that_experts_make_too_large_is_refused(tmp_path: Path, recipe: Path) -> None:
    """30.5 billion parameters on 8 GPUs and a reference need 81 GiB each; with the moments on the host they fit."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    settings = [
        f"policies.model0.model.path={tmp_path}", "policies.model0.trainer.num_ranks=8", "inference.a.engine=scripted",
        "policies.model0.trainer.gpus=[0, 1, 2, 3, 4, 5, 6, 7]", "inference.a.gpus=[]",
    ]  # fmt: skip
    (line,) = misfits(load_recipe(recipe, settings, {}))
    assert 80 < float(line.partition("needs ")[2].partition(" GiB")[0]) < 90
    assert not misfits(load_recipe(recipe, [*settings, "policies.model0.trainer.offload=[optimizer]"], {}))


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
    for told in (
        "trainer-model0",
        "Adam 30.5",
        "launch.gpu_memory_gib: 80",
        "policies.model0.trainer.offload: [optimizer",
    ):
        assert told in line
    assert misfits(load_recipe(recipe, ["policies.model0.trainer.master_dtype=bfloat16"], {})) == []
    assert misfits(load_recipe(recipe, ["launch.gpu_memory_gib=141"], {})) == []


def test_a_run_with_sglang_is_refused_where_the_package_is_missing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("ROLLMILL_SGLANG_PYTHON", sys.executable)
    loaded = load_recipe(recipe, ["policies.model0.trainer.master_dtype=bfloat16"], {})
    with pytest.raises(ConfigError, match=r"inference\.a\.engine is sglang, but the package sglang is not installed"):
        check_launch(loaded)
