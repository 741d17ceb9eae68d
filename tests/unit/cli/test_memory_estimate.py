"""The memory of a layout, estimated before any process starts: the formulas, and the refused layouts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services.cli.check.memory import (
    GIB,
    ModelShape,
    adapter_parameters,
    engine_parts,
    misfits,
    trainer_rank_parts,
)
from services.cli.check.recipe import check_launch
from services.common.config.algorithm import M2po
from services.common.config.loading import load_recipe
from services.common.config.processes import InferenceConfig
from services.common.config.training import AdapterConfig, PolicyConfig, TrainerConfig
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


def few_tokens(section: PolicyConfig) -> PolicyConfig:
    """The peak is then in the update, not in a backward pass."""
    trainer = section.trainer.model_copy(update={"token_budget": 16})
    model = section.model.model_copy(update={"context_length": 16})
    return section.model_copy(update={"trainer": trainer, "model": model})


def test_an_8b_model_on_two_ranks_needs_bfloat16_masters_on_80_gib() -> None:
    assert QWEN3_8B is not None
    whole = sum(trainer_rank_parts(QWEN3_8B, policy(2)).values())
    half = sum(trainer_rank_parts(QWEN3_8B, policy(2, "bfloat16")).values())
    four = sum(trainer_rank_parts(QWEN3_8B, policy(4)).values())
    assert half < 80 * GIB < whole and four < 80 * GIB


def test_an_adapter_leaves_one_copy_of_the_weights_and_moments_of_the_adapter_alone() -> None:
    assert QWEN3_8B is not None
    adapter = AdapterConfig(rank=16, alpha=32)
    size = adapter_parameters(QWEN3_8B, adapter)
    assert size == 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)) == 43_646_976
    parts = trainer_rank_parts(QWEN3_8B, policy(1).model_copy(update={"adapter": adapter}))
    assert parts["weights"] == 2 * 8_190_735_360 + 4 * size, "the base in compute_dtype, the adapter in master_dtype"
    assert (parts["gradients"], parts["Adam"], parts["reference"]) == (4 * size, 8 * size, 0)
    assert sum(parts.values()) < 40 * GIB < sum(trainer_rank_parts(QWEN3_8B, policy(1)).values())
    few = adapter.model_copy(update={"targets": ["q_proj"]})
    assert adapter_parameters(QWEN3_8B, few) == 36 * 16 * 2 * 4096


def test_what_is_offloaded_takes_no_gpu_memory_but_the_moments_in_flight() -> None:
    """So 8B with float32 masters and a KL reference fits on two GPUs of 80 GiB, by the moments alone."""
    assert QWEN3_8B is not None
    whole = trainer_rank_parts(QWEN3_8B, policy(2))
    parts = trainer_rank_parts(QWEN3_8B, policy(2, offload=("optimizer", "reference")))
    assert parts["reference"] == 0
    assert parts["Adam"] == 0, "a bucket of moments is there when no activations are"
    assert all(parts[name] == whole[name] for name in ("weights", "gradients", "gathered", "activations", "backward"))
    assert sum(parts.values()) < 80 * GIB < sum(whole.values())
    assert sum(trainer_rank_parts(QWEN3_8B, policy(2, offload=("optimizer",))).values()) < 75 * GIB
    small = replace(QWEN3_8B, num_parameters=50_000_000, vocabulary=1000, hidden=512, intermediate=1024)
    kept, moved = (trainer_rank_parts(small, few_tokens(policy(1, offload=what))) for what in ((), ("optimizer",)))
    assert moved["update"] == kept["Adam"], "less than a bucket would take"


def test_gradient_checkpointing_keeps_one_layers_work() -> None:
    assert QWEN3_8B is not None
    section = policy(4)
    all_kept = section.model_copy(
        update={"trainer": section.trainer.model_copy(update={"gradient_checkpointing": False})}
    )
    narrow = replace(QWEN3_8B, vocabulary=1000)  # or the peak with all layers' work is in the head
    saved, kept = (trainer_rank_parts(narrow, p)["activations"] for p in (section, all_kept))
    # All layers keep their activations, or 36 inputs and the activations of one layer; both hold one gated gradient
    layer, gate, hidden = (8 * 4096 + 4 * 12_288 + 5 * (4096 + 1024)) * 2, 2 * 12_288 * 2, 4096 * 2
    assert kept / saved == pytest.approx((36 * layer + gate) / (36 * hidden + layer + gate))


def test_sharded_parts_follow_parameters_ranks_and_types() -> None:
    assert QWEN3_8B is not None
    parts = trainer_rank_parts(QWEN3_8B, policy(4))
    shard = QWEN3_8B.num_parameters * 4 / 4
    assert (parts["weights"], parts["gradients"], parts["Adam"]) == (shard, shard, 2 * shard)
    assert parts["reference"] == shard / 2, "a frozen model is held in the compute type"
    assert trainer_rank_parts(QWEN3_8B, policy(4, kl=0.0))["reference"] == 0
    # 17,408 tokens * (36 layers * 4096 * 2 bytes + (13 * 4096 + 5 * 1024 + 6 * 12288) * 2 bytes of one layer)
    assert parts["activations"] == 17_408 * (36 * 4096 * 2 + (13 * 4096 + 5 * 1024 + 6 * 12_288) * 2)


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
