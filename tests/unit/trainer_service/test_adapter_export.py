"""An exported adapter is one that PEFT loads; merged into its base it computes the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.config.training import AdapterConfig, OptimizerConfig
from services.common.errors import ConfigError, CorruptDataError
from services.common.export import ExportForm, export_checkpoint
from services.common.lora import adapter_weights, identity_of
from services.common.text.chat import load_tokenizer
from services.trainer.checkpoints import (
    Checkpoints,
    checkpoint_files,
)
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import AdapterSetup, PolicyModel, digest_base, load_policy_model
from services.trainer.ranks import Ranks
from tests.unit.trainer_service.building import save_model

RANKS = Ranks.single()
IDS = torch.arange(15)[None] * 3 % 31


def trained(source: Path, *, dtype: torch.dtype = torch.float32, value_head: bool = False) -> PolicyModel:
    config = AdapterConfig(rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
    setup = AdapterSetup(config=config, dtype=torch.float32, seed=1)
    model = load_policy_model(source, RANKS, dtype=dtype, adapter=setup, value_head=value_head)
    model.base = digest_base(model.causal_lm, RANKS, "blake3", str(source))
    model.adapter = identity_of(model.causal_lm, config, model.base.digest)
    generator = torch.Generator().manual_seed(0)
    for weight in adapter_weights(model.causal_lm).values():
        weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def saved(directory: Path, **settings: Any) -> tuple[Path, PolicyModel, Path]:
    """A checkpoint with an adapter, its model, and its base."""
    source = save_model(directory / "base", tied=True)
    model = trained(source, **settings)
    files = checkpoint_files(model, load_tokenizer(source), "float32")
    checkpoints = Checkpoints(directory / "c", "r", "p", 2, RANKS, files)
    checkpoints.save(3, model, PolicyOptimizer(model.named_parameters(), OptimizerConfig(lr=1e-2)))
    return checkpoints.path(3), model, source


def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.parametrize("shard_bytes", [4 << 30, 4000])
def test_from_pretrained_loads_a_merged_adapter(tmp_path: Path, shard_bytes: int) -> None:
    path, model, _ = saved(tmp_path, value_head=True)
    exported = export_checkpoint(path, tmp_path / "out", shard_bytes=shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(model.causal_lm), atol=1e-5)
    assert exported.num_tensors == len(dict(loaded.named_parameters())) and exported.dtype == "float32"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not list((tmp_path / "out").glob("adapter*")) and not (tmp_path / "out" / "base.json").exists()


def test_a_base_in_bfloat16_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    path, model, source = saved(tmp_path, dtype=torch.bfloat16)
    export_checkpoint(path, tmp_path / "out")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert {weight.dtype for weight in loaded.values()} == {torch.bfloat16}
    base, own = (
        dict(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).named_parameters()),
        dict(model.causal_lm.named_parameters()),
    )
    name = "model.layers.1.mlp.down_proj"
    product = own[f"{name}.lora_B.weight"] @ own[f"{name}.lora_A.weight"]
    expected = (base[f"{name}.weight"].float() + 2.0 * product).to(torch.bfloat16)
    assert torch.equal(loaded[f"{name}.weight"], expected)
    assert torch.equal(loaded["model.layers.1.mlp.up_proj.weight"], base["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.needs("peft")
def test_peft_loads_an_exported_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    path, model, source = saved(tmp_path, value_head=True)
    exported = export_checkpoint(path, tmp_path / "out", form=ExportForm.ADAPTER)
    assert sorted(file.name for file in (tmp_path / "out").glob("adapter*")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert not (tmp_path / "out" / "config.json").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "out")
    assert torch.allclose(logits(loaded.base_model.model), logits(model.causal_lm), atol=1e-6)
    assert exported.num_tensors == 2 * 2 * 2


def changed(source: Path) -> None:
    save_model(source, tied=True, seed=1)


def renamed(source: Path) -> None:
    (source / "model.safetensors").unlink()
    save_model(source.parent / "other", tied=False)
    file = source.parent / "other" / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"model.norm.weight", b"model.morn.weight"))
    file.rename(source / "model.safetensors")


def torn(source: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{oops")


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (changed, CorruptDataError, "is not the base of this adapter .*--base"),
        (renamed, ConfigError, "has no tensor model.norm.weight"),
        (torn, ConfigError, "the base of the adapter cannot be read as safetensors"),
        (shutil.rmtree, ConfigError, "name its directory with --base, or export with --adapter"),
    ],
)
def test_a_base_that_is_another_or_gone_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    path, model, source = saved(tmp_path)
    copy = shutil.copytree(source, tmp_path / "copy")
    damage(source)
    with pytest.raises(error, match=says):
        export_checkpoint(path, tmp_path / "out")
    assert not list(tmp_path.glob("out*")), "nothing is left"
    export_checkpoint(path, tmp_path / "out", base=copy)
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model.causal_lm), atol=1e-5
    )
