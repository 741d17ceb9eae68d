from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from services.common.errors import ConfigError, ModelMismatchError
from services.common.text.chat import load_model
from services.common.weights.snapshot import named_weights
from services.trainer.model import policy_model
from services.trainer.model.policy_model import load_policy_model, open_by_shards
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import (
    tiny_causal_lm,
    tiny_experts,
)

# -- Loading by shards, the fallback to loading whole, and refusals with the messages of loading whole.


WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_causal_lm().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(model: Path, change: Any) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def test_nothing_but_names_is_read_before_the_model_is_sharded(model: Path) -> None:
    opened = open_by_shards(model, torch.float32)
    assert opened is not None
    assert {weight.device.type for weight in named_weights(opened.causal_lm).values()} == {"meta"}


def test_the_settings_for_generation_come_along(model: Path) -> None:
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.7, "do_sample": True}))
    loaded = load_policy_model(model, Ranks.single()).causal_lm
    assert loaded.generation_config.temperature == load_model(model).generation_config.temperature == 0.7


def test_a_missing_weight_is_refused(model: Path) -> None:
    rewrite(model, lambda t: t.pop("model.norm.weight"))
    assert open_by_shards(model, torch.float32) is None
    with pytest.raises(ModelMismatchError, match=r"missing keys model\.norm\.weight"):
        load_policy_model(model, Ranks.single())


def test_a_weight_of_another_shape_is_refused(model: Path) -> None:
    rewrite(model, lambda t: t.update({"model.norm.weight": torch.ones(15)}))
    with pytest.raises(ModelMismatchError, match=r"model\.norm\.weight has shape \[15\], the model \[16\]"):
        load_policy_model(model, Ranks.single())


def test_a_file_that_the_index_names_and_that_is_missing_is_refused(tmp_path: Path) -> None:
    tiny_causal_lm().save_pretrained(tmp_path, max_shard_size="4KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        load_policy_model(tmp_path, Ranks.single())


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_policy_model(tmp_path / "nowhere", Ranks.single())


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    tiny_experts().save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


def test_experts_are_read_one_by_one_into_the_merged_weights(experts: Path) -> None:
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(experts / WEIGHTS)
    assert open_by_shards(experts, torch.float32) is not None
    loaded, whole = load_policy_model(experts, Ranks.single()), load_model(experts)
    assert named_weights(loaded.causal_lm).keys() == named_weights(whole).keys()
    for name, weight in named_weights(loaded.causal_lm).items():
        assert torch.equal(weight, named_weights(whole)[name]), name


def test_a_rank_reads_its_own_experts_and_no_others(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_half(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        first = len(weight) // 2
        return weight[first:], first

    monkeypatch.setattr(policy_model, "local_rows", second_half)
    opened = open_by_shards(experts, torch.float32)
    assert opened is not None
    with torch.no_grad():
        read = opened.materialize(opened.causal_lm, torch.device("cpu"))
    whole = named_weights(load_model(experts))
    for name, weight in named_weights(opened.causal_lm).items():
        assert torch.equal(second_half(weight)[0], second_half(whole[name])[0]), name
    assert read == sum(second_half(weight)[0].numel() * 4 for weight in whole.values())


def test_an_expert_of_another_size_is_refused(experts: Path) -> None:
    rewrite(experts, lambda t: t.update({"model.layers.1.mlp.experts.2.down_proj.weight": torch.zeros(16, 9)}))
    with pytest.raises(
        ModelMismatchError, match=r"experts\.2\.down_proj\.weight has shape \[16, 9\], the model \[16, 8\]"
    ):
        load_policy_model(experts, Ranks.single())


def test_names_that_are_converted_in_another_way_are_loaded_whole_and_right(tmp_path: Path) -> None:
    """Mixtral also renames the block that holds its experts."""
    torch.manual_seed(0)
    original = MixtralForCausalLM(MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    ))  # fmt: skip
    original.save_pretrained(tmp_path)
    assert open_by_shards(tmp_path, torch.float32) is None
    for name, weight in named_weights(load_policy_model(tmp_path, Ranks.single()).causal_lm).items():
        assert torch.equal(weight, named_weights(original)[name]), name


def test_copies_that_do_not_fit_a_host_are_refused_with_the_figure(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30B of experts in float32 on eight ranks: 960 GB."""
    rewrite(experts, lambda t: t.update({"extra": torch.zeros(1)}))  # now it takes more than reading
    size = sum(weight.numel() * 4 for weight in named_weights(tiny_experts()).values())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(policy_model, "available_bytes", lambda: 8 * size - 1)
    with pytest.raises(ConfigError, match=r"1 names differ .*: 8 ranks on this host need 0\.0 GiB .* Use fewer ranks"):
        open_by_shards(experts, torch.float32)
    monkeypatch.setattr(policy_model, "available_bytes", lambda: 8 * size)
    assert open_by_shards(experts, torch.float32) is None


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    opened = open_by_shards("someone/tiny", torch.float32)
    assert opened is not None and opened.causal_lm.config.name_or_path == "someone/tiny"
    assert open_by_shards("someone/else", torch.float32) is None
