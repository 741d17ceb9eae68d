"""The cases of the gradient tests, and how one process or two compute them. Run with torchrun, the script writes one
file.

    torchrun --nproc-per-node 2 -m tests.integration.trainer.gradient_cases OUT_DIR

Every rank computes every case; rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.training import AdapterConfig, OptimizerConfig
from services.common.errors import ConfigError
from services.common.lora import base_weights
from services.common.records import TrainingSequence
from services.common.system.child import run_and_leave
from services.common.weights.snapshot import named_weights
from services.trainer.losses import PolicyLoss, TokenBatch
from services.trainer.model.optimizer import Update
from services.trainer.model.policy_model import NAME, AdapterSetup
from services.trainer.ranks import Ranks, full, init_ranks, leave_ranks, whole_tensors
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One algorithm over one small batch."""

    config: AlgorithmConfig
    dtype: torch.dtype = torch.float64
    reference: bool = False
    teacher: bool = False
    all_on_first_rank: bool = False
    tied: bool = True
    temperature: float = 1.0
    truncated: bool = False  # tokens were drawn from some of the vocabulary, at several temperatures


# What is added to a policy loss and to the reward, all at once.
EVERYTHING: dict[str, Any] = {
    "advantage": "gae", "gamma": 0.97, "gae_lambda": 0.9, "value_head": {}, "batch_normalize_advantages": True,
    "kl_reward_coefficient": 0.2, "kl_coefficient": 0.1, "entropy_coefficient": 0.05, "early_stop_ratio": 50.0,
    "distillation": {"teacher_model": "t", "task_coefficient": 0.5},
    "rejection": [{"lower": 0.05, "upper": 8.0}, {"level": "sequence", "lower": 0.2, "upper": 3.0}],
}  # fmt: skip

CASES: dict[str, Case] = {
    **{name: Case(config=algorithm(name=name)) for name in ("ppo_clip", "sapo", "reinforce")},
    "gspo": Case(config=algorithm(name="gspo", eps_clip=0.2, eps_clip_higher=0.2)),  # type: ignore[arg-type]
    "m2po": Case(config=algorithm(name="m2po", m2po_threshold=0.2)),
    "m2po_mask": Case(config=algorithm(name="m2po_mask", m2po_threshold=0.5)),
    "tis_normalized": Case(
        config=algorithm(name="tis", importance_level="sequence_mean", importance_cap=1.5, importance_normalize=True)),
    "cispo": Case(config=algorithm(name="cispo", importance_cap=2.0)),
    "decoupled_ppo": Case(config=algorithm(name="decoupled_ppo", importance_cap=2.0)),
    "constant": Case(config=algorithm(
        name="ppo_clip", advantage="dr_grpo", loss_aggregation="constant", constant_denominator=16)),
    "reinforce_plus_plus": Case(
        config=algorithm(name="ppo_clip", advantage="reinforce", batch_normalize_advantages=True,
                               kl_reward_coefficient=0.2), reference=True),
    "gae": Case(config=algorithm(name="ppo_clip", advantage="gae", gamma=0.97, gae_lambda=0.9, value_head={})),
    "discounted": Case(
        config=algorithm(name="ppo_clip", advantage="reinforce", gamma=0.9, batch_normalize_advantages=True,
                         normalize_deviation="sample")),
    "batch_deviation": Case(config=algorithm(name="ppo_clip", deviation="batch")),
    "distilled": Case(
        config=algorithm(name="m2po", m2po_threshold=0.2, distillation={"teacher_model": "t", "task_coefficient": 0.5}),
        teacher=True),
    "distilled_behaviour": Case(
        config=algorithm(name="reinforce", distillation={"teacher_model": "t", "student": "behaviour"}), teacher=True),
    "untied_hot": Case(config=algorithm(name="m2po", m2po_threshold=0.2), tied=False, temperature=0.7),
    "everything": Case(
        config=algorithm("m2po", m2po_threshold=0.2, rejection_denominator="kept", loss_aggregation="sequence_mean",
                         **EVERYTHING),
        reference=True, teacher=True, truncated=True, temperature=0.8),
    "everything_idle_rank": Case(
        config=algorithm("tis", importance_level="sequence", importance_cap=2.0, importance_normalize=True, **EVERYTHING),
        reference=True, teacher=True, truncated=True, temperature=0.8, all_on_first_rank=True),
    "float32": Case(config=algorithm(name="m2po", m2po_threshold=0.2), dtype=torch.float32),
}  # fmt: skip

GAE = {"advantage": "gae", "gae_lambda": 0.9, "value_head": {"lr": 5e-2}}

# How weights are held and computed; each is trained for two steps.


def lora(dtype: torch.dtype) -> AdapterSetup:
    """Ranks of 3 rows, which two ranks do not divide."""
    return AdapterSetup(config=AdapterConfig(rank=3, alpha=6.0), dtype=dtype, seed=3)


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16_compute": {"dtype": torch.float32, "compute_dtype": torch.bfloat16},
    "bfloat16_master": {"dtype": torch.bfloat16},
    "with_reference": {"reference": lambda: tiny_causal_lm(torch.float64, seed=1)},
    "value_head": {"credit": GAE},
    "value_head_offloaded": {"credit": GAE, "offload": True},
    "adapter": {"adapter": lora(torch.float64)},
    "offloaded": {"reference": lambda: tiny_causal_lm(torch.float64, seed=1), "offload": True},
}

NUM_SEQUENCES = 11  # odd: two ranks differ in work
TWO_RANK_MAX_TOKENS = 40


class CaptureGradients:
    """Takes the place of the optimizer; keeps whole gradients and changes no weight."""

    def __init__(self, step: TrainStep) -> None:
        self._parameters = dict(step.model.causal_lm.named_parameters())
        if step.model.value_head is not None:
            self._parameters |= {f"{NAME}{n}": p for n, p in step.model.value_head.named_parameters()}
        self.gradients: Gradients = {}

    def update(self) -> Update:
        self.gradients = {n: full(p.grad).double().numpy().copy() for n, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        return Update(grad_norm=0.0, learning_rate=0.0, applied=True)


def share(case: Case, sequences: list[TrainingSequence], rank: int, world_size: int) -> Any:
    batch = rank_batch(sequences, rank, world_size)
    if case.all_on_first_rank and world_size > 1:
        batch = dataclasses.replace(batch, sequences=tuple(sequences) if rank == 0 else ())
    return batch


def speak_up(step: TrainStep) -> None:
    """Give the value head nonzero weights: a head of zeros sends no gradient into the trunk."""
    if step.model.value_head is not None:
        with torch.no_grad():
            for parameter in step.model.value_head.parameters():
                parameter.fill_(0.1)


def gradients(case: Case, ranks: Ranks, max_tokens: int, *, gradient_checkpointing: bool = False) -> Gradients:
    """Whole gradients of one minibatch, the same on every rank."""
    step = train_step(
        case.config,
        causal_lm=tiny_causal_lm(case.dtype, tied=case.tied),
        ranks=ranks,
        max_tokens=max_tokens,
        reference=tiny_causal_lm(case.dtype, tied=case.tied, seed=1) if case.reference else None,
        teacher=tiny_causal_lm(case.dtype, tied=case.tied, seed=2) if case.teacher else None,
        gradient_checkpointing=gradient_checkpointing,
        temperature=case.temperature,
    )
    speak_up(step)
    capture = CaptureGradients(step)
    step.optimizer = capture  # type: ignore[assignment]
    step.run(share(case, training_sequences(NUM_SEQUENCES, cut=case.truncated), ranks.rank, ranks.world_size))
    return capture.gradients


def trained_step(
    ranks: Ranks,
    dtype: torch.dtype = torch.float64,
    credit: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> tuple[TrainStep, dict[str, float]]:
    """Two steps of two minibatches with the real optimizer, and the metrics of the last. ``settings`` of ``train_step``."""
    step = train_step(
        algorithm(
            name="m2po",
            m2po_threshold=0.2,
            kl_coefficient=0.1 if settings.keys() & {"reference", "adapter"} else 0.0,
            **credit,
        ),
        causal_lm=tiny_causal_lm(dtype),
        ranks=ranks,
        max_tokens=TWO_RANK_MAX_TOKENS,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5),
        **settings,
    )
    for seed in (0, 1):
        sequences = training_sequences(NUM_SEQUENCES, seed=seed, minibatches=2)
        metrics = step.run(rank_batch(sequences, ranks.rank, ranks.world_size)).as_dict()
    weights = base_weights(step.model.causal_lm).values()
    assert {weight.dtype for weight in weights} == {dtype}, "master weights keep their type"
    assert metrics["tflops"] > 0, "the layers are found, sharded or not"
    return step, metrics


def counts_what_is_there(tokens: TokenBatch, settings: Mapping[str, Any]) -> PolicyLoss:
    """A loss by path that counts no tokens on an empty minibatch."""
    counts = {"seen_tokens": tokens.mask.sum()} if len(tokens.mask) else {}
    return PolicyLoss(per_token=-tokens.advantages * tokens.logprobs, counts=counts)


def refusal(ranks: Ranks) -> str:
    """The result of a step over an idle rank with that loss."""
    case = Case(config=algorithm(f"tests.integration.trainer.gradient_cases:{counts_what_is_there.__name__}"),
                all_on_first_rank=True)  # fmt: skip
    try:
        gradients(case, ranks, TWO_RANK_MAX_TOKENS)
    except ConfigError as error:
        return error.message
    return ""


def whole_weights(step: TrainStep, ranks: Ranks) -> Gradients:
    """Every weight, those of the value head too; on the first rank."""
    weights = dict(whole_tensors(named_weights(step.model.causal_lm), ranks, torch.float64))
    if step.model.value_head is not None:
        weights |= {
            f"{NAME}{n}": w for n, w in whole_tensors(named_weights(step.model.value_head), ranks, torch.float64)
        }
    return {n: w.numpy() for n, w in weights.items() if w is not None}


def trained_weights(ranks: Ranks, **settings: Any) -> tuple[Gradients, dict[str, float]]:
    """Weights and metrics of ``trained_step``."""
    step, metrics = trained_step(ranks, **settings)
    skip = ("seconds", "tokens_per_second", "num_micro_batches", "memory_peak_gib", "tflops")
    return whole_weights(step, ranks), {n: v for n, v in metrics.items() if n not in skip}


def run(out_dir: Path) -> None:
    ranks = init_ranks(timeout_s=60.0, device="cpu")
    for name, case in CASES.items():
        found = gradients(case, ranks, TWO_RANK_MAX_TOKENS)
        if ranks.is_first:
            np.savez(out_dir / f"{name}.npz", **found)  # type: ignore[arg-type]
    checkpointed = gradients(CASES["m2po"], ranks, TWO_RANK_MAX_TOKENS, gradient_checkpointing=True)
    weights, metrics = trained_weights(ranks)
    np.savez(out_dir / f"metrics_{ranks.rank}.npz", **{n: np.array(v) for n, v in metrics.items()})  # type: ignore[arg-type]
    if ranks.is_first:
        np.savez(out_dir / "checkpointed.npz", **checkpointed)  # type: ignore[arg-type]
        np.savez(out_dir / "weights.npz", **weights)  # type: ignore[arg-type]
    for name, settings in PRECISIONS.items():
        found, _ = trained_weights(ranks, **{k: make() if callable(make) else make for k, make in settings.items()})
        if ranks.is_first:
            np.savez(out_dir / f"precision_{name}.npz", **found)  # type: ignore[arg-type]
    (out_dir / f"refusal_{ranks.rank}").write_text(refusal(ranks))
    leave_ranks()


def main() -> int:
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
