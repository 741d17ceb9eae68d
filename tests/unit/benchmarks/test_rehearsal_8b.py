"""The estimate of `rollmill check` against the storages of a training step, at small shapes and in every kind of layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal_8b import layouts, measured_and_estimated  # type: ignore[import-not-found]
from services.cli.check.memory import ModelShape
from services.common.config.algorithm import M2po
from services.common.config.training import AdapterConfig, BatchConfig, ModelConfig, PolicyConfig, TrainerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


LAYERS, HIDDEN, WIDE, KV, VOCABULARY = 2, 1024, 3072, 256, 32_768


def shape(*, tied: bool = False, head_norms: bool = True, vocabulary: int = VOCABULARY) -> ModelShape:
    attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV
    return ModelShape(
        num_parameters=LAYERS * (attention + 3 * HIDDEN * WIDE) + vocabulary * HIDDEN * (1 if tied else 2),
        num_layers=LAYERS, hidden=HIDDEN, intermediate=WIDE, kv_width=KV, vocabulary=vocabulary, tied=tied,
        head_norms=head_norms,
    )  # fmt: skip


def policy(*, kl: float = 0.0, tokens: int = 8192, **trainer: Any) -> PolicyConfig:
    section = {"num_ranks": 2, "compute_dtype": "bfloat16", "gradient_checkpointing": True, "token_budget": tokens}
    return PolicyConfig(
        model=ModelConfig(context_length=64),
        batch=BatchConfig(size=tokens // 64),
        algorithm=M2po(kl_coefficient=kl),
        trainer=TrainerConfig.model_validate({**section, **trainer}),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "section"),
    [
        (shape(), policy(num_ranks=4, kl=0.1)),
        (shape(head_norms=False), policy(master_dtype="bfloat16", offload=["optimizer"])),
        (shape(), policy(gradient_checkpointing=False, tokens=4096)),
        (shape(), policy(tokens=256)),  # the peak is in the embedding
        (shape(tied=True, vocabulary=131_072), policy(tokens=2048, gradient_checkpointing=False)),  # in the head
    ],
    ids=["four and reference", "offload and bfloat16 without norms", "kept", "short", "wide head"],
)
def test_the_estimate_is_within_three_percent_of_the_storages_of_a_step(of: ModelShape, section: PolicyConfig) -> None:
    peak, estimate = measured_and_estimated(of, section)
    assert estimate == pytest.approx(peak, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "section"),
    [
        (shape(), policy(num_ranks=4, kl=0.1)),
        (shape(), policy(gradient_checkpointing=False, tokens=4096)),
    ],
    ids=["four and reference", "kept"],
)
def test_the_estimate_below_an_adapter_is_within_three_percent(of: ModelShape, section: PolicyConfig) -> None:
    adapted = section.model_copy(update={"adapter": AdapterConfig(rank=16, alpha=32)})
    peak, estimate = measured_and_estimated(of, adapted)
    assert estimate == pytest.approx(peak, rel=0.03)


def test_every_policy_of_the_real_recipes_has_a_layout() -> None:
    found = layouts()
    owners = [owner for _, _, recipes in found.values() for owner in recipes]
    assert len(owners) == len(set(owners)) == 25
    names = ("Qwen3-8B", "Qwen3-1.7B", "Qwen3-0.6B", "Qwen2.5-7B-Instruct", "Qwen2.5-1.5B-Instruct")
    assert {model for model, _ in found} == {f"Qwen/{name}" for name in names}
