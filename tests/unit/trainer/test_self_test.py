"""A model that the trainer would compute in another way than the model itself is refused at load; others are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.models import BOUND, LONG, difference
from services.cli.check import trial
from services.common.errors import ModelMismatchError
from services.trainer.model.policy_model import PolicyModel, load_policy_model
from services.trainer.ranks import Ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


ROPE = {"rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "attention_factor": 1.0}


def saved(folder: Path, kind: str, **settings: Any) -> Path:
    """A random model of ``transformers.<kind>ForCausalLM`` on the disk."""
    config = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")(**SIZES | settings)
    torch.manual_seed(3)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> PolicyModel:
    return load_policy_model(folder, Ranks.single())


@pytest.mark.parametrize(
    ("kind", "settings", "refusal"),
    [
        ("Lfm2", {"layer_types": ["full_attention", "conv"]}, "other log-probabilities packed than alone"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "other log-probabilities packed than alone"),
        ("Phi", {}, "other log-probabilities packed than alone"),  # a bias of the head
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.2}, None),
        ("Gemma3", {"head_dim": 8}, None),
        ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, None),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 1000.0, "attn_logit_softcapping": None}, "than alone"),
        ("Llama", {"rope_parameters": {**ROPE, "rope_type": "longrope", "original_max_position_embeddings": 5}}, "than alone"),
        ("Gemma2", {"head_dim": 8}, "softcap"),
        ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}, "than alone"),
    ],
)  # fmt: skip
def test_an_architecture_is_exact_or_refused(
    kind: str, settings: dict[str, Any], refusal: str | None, tmp_path: Path
) -> None:
    folder = saved(tmp_path, kind, **settings)
    if refusal is None:
        assert difference(folder, loaded(folder), LONG) <= BOUND
    else:
        with pytest.raises(ModelMismatchError, match=refusal):
            loaded(folder)


LENGTHS: dict[str, Callable[[int], dict[str, Any]]] = {
    "Mistral": lambda n: {"sliding_window": n},
    "Phimoe": lambda n: {"sliding_window": n, "num_local_experts": 4},
    "Phi3": lambda n: {"original_max_position_embeddings": n, "rope_parameters": {**ROPE, "rope_type": "longrope"}},
}


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("kind", LENGTHS)
def test_documents_beyond_a_window_or_a_switch_of_rotary_factors_are_refused_and_shorter_ones_exact(
    kind: str, length: int, tmp_path: Path
) -> None:
    folder = saved(tmp_path, kind, **LENGTHS[kind](length))
    model = loaded(folder)
    assert model.limit is not None and model.limit.tokens == length
    assert difference(folder, model, (length, 6, 3, 5)) <= BOUND
    with pytest.raises(ModelMismatchError, match=rf"write model\.context_length: {length} or less"):
        difference(folder, model, LONG)


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
    settings: dict[str, Any],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = saved(tmp_path, "Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    monkeypatch.setattr("sys.argv", ["trial", "trainer", str(folder), "32"])
    assert trial.main() == code
    assert says in capsys.readouterr().err
