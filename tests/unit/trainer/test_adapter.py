"""LoRA in the trainer: only the adapter is trained, kept and published, and it computes as PEFT does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config.training import AdapterConfig, OptimizerConfig
from services.common.errors import ConfigError, ModelMismatchError
from services.common.lora import (
    adapter_off,
    adapter_weights,
)
from services.common.weights.snapshot import PEFT_PREFIX, Snapshot
from services.trainer.checkpoints import Checkpoints
from services.trainer.model.policy_model import AdapterSetup
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

RANK, ALPHA = 4, 8.0
ATTENTION = ["q_proj", "v_proj"]


def setup(targets: Any = "all-linear", rank: int = RANK, dtype: torch.dtype = torch.float32) -> AdapterSetup:
    return AdapterSetup(config=AdapterConfig(rank=rank, alpha=ALPHA, targets=targets), dtype=dtype, seed=3)


def adapted(kl: float = 0.1, causal_lm: Any = None, adapter: AdapterSetup | None = None, **optimizer: Any) -> TrainStep:
    return train_step(
        algorithm("reinforce", kl_coefficient=kl),
        causal_lm=causal_lm,
        adapter=adapter or setup(),
        optimizer=OptimizerConfig(**{"lr": 1e-2, "max_grad_norm": None, **optimizer}),
    )


def batch(step: int = 5) -> Any:
    return rank_batch(training_sequences(8, seed=step), step=step)


def snapshot_of(step: TrainStep, directory: Path, dtype: str = "float32") -> Snapshot:
    ranks = Ranks.single()
    made = Snapshots(step.model, ranks, run_id="r", policy="p", dtype=dtype, directories=(directory,)).write(1)
    assert made is not None
    return Snapshot(made.path)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def test_version_0_is_the_base_and_the_reference_stays_the_base() -> None:
    step = adapted()
    ids = torch.arange(12)[None] % 31
    base = logits(tiny_causal_lm(), ids)
    step.model.causal_lm.set_attn_implementation("sdpa")
    assert torch.equal(logits(step.model.causal_lm, ids), base)
    for weight in adapter_weights(step.model.causal_lm).values():
        weight.add_(0.1)
    assert not torch.allclose(logits(step.model.causal_lm, ids), base, atol=1e-2)
    with adapter_off(step.model):
        assert torch.equal(logits(step.model.causal_lm, ids), base)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (
            ["q_proj", "qproj"],
            r"names 'qproj', and Qwen3ForCausalLM has no module of it: write some of down_proj, gate",
        ),
        (["lm_head"], "names 'lm_head', .* no linear module of it that an adapter can have"),
        (["self_attn"], "names 'self_attn', .* no linear module of it"),
        (["embed_tokens"], "names 'embed_tokens', .* no linear module of it"),
    ],
)
def test_a_target_that_is_no_linear_module_is_refused(targets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        adapted(adapter=setup(targets))


def test_a_version_is_the_adapter_and_its_digest_covers_the_base(tmp_path: Path) -> None:
    step = adapted(adapter=setup(ATTENTION))
    snapshot = snapshot_of(step, tmp_path)
    names = {entry.name for entry in snapshot.manifest.tensors}
    assert names == {
        f"{PEFT_PREFIX}model.layers.{layer}.self_attn.{target}.lora_{factor}.weight"
        for layer in range(2) for target in ATTENTION for factor in "AB"
    }  # fmt: skip
    held = sum(entry.size_bytes for entry in snapshot.manifest.tensors)
    assert held == 4 * 2 * RANK * ((16 + 32) + (16 + 16)), "rank * (inputs + outputs) of q_proj and v_proj"
    other = snapshot_of(adapted(adapter=setup(ATTENTION), causal_lm=tiny_causal_lm(seed=1)), tmp_path / "..")
    assert [e.digest for e in other.manifest.tensors] == [e.digest for e in snapshot.manifest.tensors]
    assert other.manifest.digest != snapshot.manifest.digest, "the same tensors on another base are another version"
    other.retire()
    snapshot.retire()


def checkpoints(directory: Path) -> Checkpoints:
    return Checkpoints(directory, "r", "p", 2, Ranks.single())


def test_a_checkpoint_has_the_adapter_only_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = adapted()
    straight.run(batch(1))
    checkpoints(tmp_path).save(1, straight.model, straight.optimizer)
    manifest = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())["content"]
    assert all("lora_" in name for name in manifest["tensors"] if not name.startswith("random_state"))
    assert manifest["adapter"]["base"] == straight.model.adapter.base  # type: ignore[union-attr]
    straight.run(batch(2))
    resumed = adapted(adapter=dataclasses.replace(setup(), seed=9))
    assert checkpoints(tmp_path).restore(resumed.model, resumed.optimizer) == 1
    resumed.run(batch(2))
    left, right = (adapter_weights(step.model.causal_lm) for step in (straight, resumed))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: adapted(causal_lm=tiny_causal_lm(seed=1)), "holds another adapter: base xxh3-128:"),
        (lambda: adapted(adapter=setup(rank=2)), "holds another adapter: rank 4, expected 2$"),
        (
            lambda: adapted(adapter=setup(ATTENTION)),
            "holds another adapter: targets down_proj, .* expected q_proj, v_proj",
        ),
        (lambda: train_step(algorithm()), "holds an adapter, expected all weights of a model"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(tmp_path: Path, other: Any, says: str) -> None:
    step = adapted()
    checkpoints(tmp_path).save(1, step.model, step.optimizer)
    wrong = other()
    with pytest.raises(ModelMismatchError, match=says):
        checkpoints(tmp_path).restore(wrong.model, wrong.optimizer)


@pytest.mark.needs("peft")
@pytest.mark.parametrize("targets", ["all-linear", ATTENTION])
def test_logits_and_gradients_are_those_of_peft(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    step = adapted(adapter=setup(targets))
    generator = torch.Generator().manual_seed(0)
    own = adapter_weights(step.model.causal_lm)
    for weight in own.values():
        weight.normal_(generator=generator).mul_(0.1)
    theirs = get_peft_model(
        tiny_causal_lm(), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    )
    loaded = set_peft_model_state_dict(theirs, dict(own))
    assert not loaded.unexpected_keys
    assert len([p for p in theirs.parameters() if p.requires_grad]) == len(own)
    ids = torch.arange(14)[None] * 5 % 31
    step.model.causal_lm.set_attn_implementation("sdpa")
    outputs = [model(ids).logits for model in (step.model.causal_lm, theirs)]
    assert torch.allclose(*outputs, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    gradients = {name: p.grad for name, p in step.model.causal_lm.named_parameters() if p.grad is not None}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            mine = gradients.pop(name.removeprefix(PEFT_PREFIX).replace(".default", ""))
            assert torch.allclose(mine, parameter.grad, rtol=1e-4, atol=1e-4), name  # type: ignore[arg-type]
    assert not gradients
