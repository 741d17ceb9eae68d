"""A model that the trainer would compute in another way than the model itself is refused at load; others are exact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.models import BOUND, LONG, SHORT, difference, survey
from services.common.errors import ModelMismatchError
from services.trainer.model.policy_model import PolicyModel, load_policy_model
from services.trainer.ranks import Ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def saved(folder: Path, kind: str, **settings: Any) -> Path:
    """A random model of ``transformers.<kind>ForCausalLM`` on the disk."""
    config = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")(**SIZES | settings)
    torch.manual_seed(3)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> PolicyModel:
    return load_policy_model(folder, Ranks.single())


@pytest.mark.parametrize(
    ("kind", "settings", "layer"),
    [
        ("Lfm2", {"layer_types": ["full_attention", "conv"]}, "Lfm2ShortConv"),
        ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2}, "Mamba"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "BloomAttention"),
        ("Phi", {}, "its head"),
        ("Llama", {"num_key_value_heads": 4, "mlp_bias": True, "attention_dropout": 0.1}, None),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.2}, None),
        ("Gemma3", {"head_dim": 8}, None),
        ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, None),
        ("Granite", {"logits_scaling": 1.0007}, None),
        ("Cohere", {"logit_scale": 0.0625}, None),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 1000.0, "attn_logit_softcapping": None}, "its head"),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                    "original_max_position_embeddings": 5,
                }
            },
            "LlamaRotaryEmbedding",
        ),
        ("Gemma2", {"head_dim": 8}, "softcap"),
        (
            "GPTNeo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
            "beginnings that documents share",
        ),
    ],
)
def test_an_architecture_is_exact_or_refused_by_the_layer_that_differs(
    kind: str, settings: dict[str, Any], layer: str | None, tmp_path: Path
) -> None:
    folder = saved(tmp_path, kind, **settings)
    if layer is None:
        assert difference(folder, loaded(folder), LONG) <= BOUND
    else:
        with pytest.raises(ModelMismatchError, match=f"{layer}.*"):
            loaded(folder)


@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        ("Phimoe", {"sliding_window": 16, "num_local_experts": 4}, "sliding_window"),
        ("Mistral", {"sliding_window": 16}, "sliding_window"),
        (
            "Phi3",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            },
            "original_max_position_embeddings",
        ),
    ],
)  # fmt: skip
def test_documents_beyond_a_window_or_a_switch_of_rotary_factors_are_refused_and_shorter_ones_exact(
    kind: str, settings: dict[str, Any], field: str, tmp_path: Path
) -> None:
    model = loaded(saved(tmp_path, kind, **settings))
    assert model.limit is not None and model.limit.tokens == 16 and field in model.limit.field
    assert difference(tmp_path, model, SHORT) <= BOUND
    with pytest.raises(ModelMismatchError, match=r"write model\.context_length: 16 or less"):
        difference(tmp_path, model, LONG)


ROPE = {"rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "attention_factor": 1.0}
LENGTHS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "Mistral, a window": ("Mistral", lambda n: {"sliding_window": n}),
    "Starcoder2, a window": ("Starcoder2", lambda n: {"sliding_window": n}),
    "Phimoe, a window": ("Phimoe", lambda n: {"sliding_window": n, "num_local_experts": 4}),
    "Llama, a switch": ("Llama", lambda n: {
        "rope_parameters": {**ROPE, "rope_type": "longrope", "original_max_position_embeddings": n}}),
    "Phi3, a switch": ("Phi3", lambda n: {
        "original_max_position_embeddings": n, "rope_parameters": {**ROPE, "rope_type": "longrope"}}),
    "Llama, a growing base": ("Llama", lambda n: {
        "max_position_embeddings": n, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 25))
@pytest.mark.parametrize("case", LENGTHS)
def test_each_length_is_shown_or_looked_at(case: str, length: int, tmp_path: Path) -> None:
    kind, settings = LENGTHS[case]
    folder = saved(tmp_path, kind, **settings(length))
    try:
        model = loaded(folder)
    except ModelMismatchError:
        assert length <= 7
        return
    if model.limit is None:
        assert length < 3, "a longer window or switch changes documents"
        assert difference(folder, model, LONG) <= BOUND and difference(folder, model, (40, 57, 2, 3)) <= BOUND
    else:
        assert model.limit.tokens == length
        assert difference(folder, model, (length, 6, 3, 5)) <= BOUND


def test_the_factor_of_a_head_is_found_by_its_effect(tmp_path: Path) -> None:
    assert loaded(saved(tmp_path, "Granite", logits_scaling=5.0)).logit_scale == pytest.approx(0.2, rel=1e-4)


def test_noise_stays_off_in_training_mode(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path, "OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.5)).train()
    tokens = torch.arange(1, 20)
    assert torch.equal(model.plain(tokens)[0], model.plain(tokens)[0])


def test_a_load_leaves_the_random_state_of_the_run_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Llama")
    torch.manual_seed(5)
    load_policy_model(folder, Ranks.single())
    first = torch.rand(3)
    torch.manual_seed(5)
    load_policy_model(folder, Ranks.single())
    assert torch.equal(first, torch.rand(3))


@pytest.mark.slow
def test_a_dozen_types_with_windows_noise_and_mixed_layers_are_exact_or_refused() -> None:
    found = survey(["llama", "lfm2", "gemma3_text", "granite", "phimoe", "phi3", "jamba", "stablelm"])
    assert not found["wrong"] and not found["crash"]
    assert {"llama", "gemma3_text", "granite", "phimoe, noise"} <= found["exact"].keys()
    assert {"lfm2, layers conv", "phimoe, window", "phi3, longrope", "jamba"} <= found["refused"].keys()


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelMismatchError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are infinite or NaN"
    ):
        loaded(folder)


def test_sizes_beyond_the_memory_are_compared_with_the_files_first(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Llama", head_dim=8)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 48_000_000_000}))
    with pytest.raises(ModelMismatchError, match=r"weights do not fit config\.json"):
        loaded(folder)


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [({"hidden_act": "nope"}, 2, "config.json makes no model: KeyError: 'nope'"), ({}, 0, "")],
)
def test_a_config_that_makes_no_model_is_a_problem_of_the_check(
    settings: dict[str, Any], code: int, says: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    ended = subprocess.run(
        [sys.executable, "-m", "services.trainer.model.check", folder, "32"], capture_output=True, text=True
    )
    assert ended.returncode == code and says in ended.stderr
