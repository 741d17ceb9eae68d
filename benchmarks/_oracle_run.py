"""Runs a policy loss of the trainer on the tokens of an oracle's case, as a training step does on a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks._oracle_vectors import Case
from services.common.config.algorithm import AlgorithmConfig
from services.common.records import MinibatchTotals
from services.trainer.losses import aggregate, algorithm_of
from services.trainer.micro_batches import MicroTensors, MinibatchContext, minibatch_context
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import Targets
from services.trainer.ranks import Ranks
from services.trainer.step import with_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOnCase:
    """Per-token lists have an entry for every token of the case, 0 for an untrained one."""

    loss: float
    gradient: list[float]
    per_token_loss: list[float]
    kept: list[int]
    counts: dict[str, int]
    context: MinibatchContext


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a case, float64; sequences without one are left out, as no step is given such a sequence."""

    case: Case
    index: torch.Tensor  # [num_trained] position of each among all tokens of the case
    sequence: torch.Tensor  # [num_trained] int64 in [0, num_sequences)

    @classmethod
    def of(cls, case: Case) -> Tokens:
        lengths = np.array(case.inputs["sequence_lengths"])
        index = np.flatnonzero(np.array(case.inputs["mask"]))
        _, sequence = np.unique(np.repeat(np.arange(len(lengths)), lengths)[index], return_inverse=True)
        return cls(case, torch.as_tensor(index), torch.as_tensor(sequence))

    @property
    def num_sequences(self) -> int:
        return int(self.sequence[-1]) + 1

    def input(self, name: str) -> torch.Tensor:
        """[num_trained]; zeros where the case has no such input."""
        values = self.case.inputs.get(name, [0.0] * len(self.case.inputs["mask"]))
        return torch.tensor(values, dtype=torch.float64)[self.index]

    def spread(self, values: torch.Tensor) -> list[float]:
        """Back to all tokens of the case, zeros on those that are not trained."""
        full = torch.zeros(len(self.case.inputs["mask"]), dtype=torch.float64)
        full[self.index] = values.detach().double()
        return full.tolist()


def run_loss(case: Case, config: AlgorithmConfig, *, parts: int = 1) -> LossOnCase:
    """``parts``: micro-batches into which the sequences are dealt; the answer must not depend on ``parts``."""
    tokens, algorithm = Tokens.of(case), algorithm_of(config)
    logprobs = tokens.input("logprobs").requires_grad_()
    proximal = tokens.input("proximal")
    chosen = [torch.nonzero(tokens.sequence % parts == part).squeeze(1) for part in range(parts)]
    batches = [with_teacher(_micro_batch(tokens, own, config), logprobs.detach()[own], config) for own in chosen]
    context = minibatch_context(
        algorithm,
        config,
        batches,
        MinibatchTotals(num_sequences=tokens.num_sequences, num_trained_tokens=len(tokens.index)),
        Ranks.single(),
        current=[logprobs.detach()[own] for own in chosen],
        proximal=[proximal[own] for own in chosen],
    )
    per_token, kept = torch.zeros_like(proximal), torch.zeros_like(proximal)
    counts: dict[str, int] = {}
    total = torch.zeros((), dtype=torch.float64)
    for i, (own, batch) in enumerate(zip(chosen, batches, strict=True)):
        given = context.tokens(i, batch, logprobs[own], proximal[own])
        found = algorithm.loss(given, config)
        axes = (batch.sequence_index, batch.num_sequences)
        share = aggregate(found.per_token, given.mask, *axes, context.totals, config, counted=context.counted[i])
        total = total + share
        per_token[own], kept[own] = found.per_token.detach(), given.mask.double()
        for name, count in found.counts.items():
            counts[name] = counts.get(name, 0) + int(count)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return LossOnCase(
        loss=total.item(),
        gradient=tokens.spread(gradient),
        per_token_loss=tokens.spread(per_token),
        kept=[int(k) for k in tokens.spread(kept)],
        counts=counts,
        context=context,
    )


def without(values: Sequence[float], left_out: Sequence[int]) -> list[float | None]:
    """The values, None at the positions that are left out of a comparison."""
    return [None if i in set(left_out) else value for i, value in enumerate(values)]


def _micro_batch(tokens: Tokens, own: torch.Tensor, config: AlgorithmConfig) -> MicroTensors:
    count = len(own)
    _, sequence = torch.unique(tokens.sequence[own], return_inverse=True)
    return MicroTensors(
        token_ids=torch.zeros(count, dtype=torch.int64),
        position_ids=torch.zeros(count, dtype=torch.int64),
        documents=Documents.from_offsets(np.array([0, count])),
        targets=Targets(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        behaviour=tokens.input("behaviour")[own],
        advantages=tokens.input("advantages")[own],
        weight_versions=torch.zeros(count, dtype=torch.int64),
        mixed_cache=torch.zeros(count, dtype=torch.bool),
        sequence_index=sequence,
        num_sequences=int(sequence.max()) + 1 if count else 0,
        is_dummy=False,
        num_given_tokens=count,
        teacher=None if config.distillation is None else tokens.input("reference")[own],
    )
