"""Supervised updates for a warm start: cross entropy over the masked tokens of demonstrations.

Uses the same packing, attention and log-probability code as the RL step. Independent of chat templates and files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from services.trainer.micro_batches import forward, logprob_dtype, pack_for_ranks
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel
from services.trainer.packing import Document
from services.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedMetrics:
    """One supervised update, over all ranks."""

    loss: float  # mean cross entropy per masked token, in nats
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_trained_tokens: int
    seconds: float


class SupervisedStep:
    """One update per call, over each rank's own documents (``Document.supervised``)."""

    def __init__(
        self, model: PolicyModel, optimizer: PolicyOptimizer, ranks: Ranks, *, max_tokens_per_micro_batch: int
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.ranks = ranks
        self._max_tokens = max_tokens_per_micro_batch
        self._dtype = logprob_dtype(model)

    def run(self, documents: Seq[Document]) -> SupervisedMetrics:
        """loss = -sum of log-probabilities / masked tokens of all ranks."""
        started = time.perf_counter()
        counts = [sum(d.num_trained_tokens for d in documents), sum(d.num_tokens for d in documents)]
        trained, tokens = self.ranks.sum(torch.tensor(counts, device=self.ranks.device)).tolist()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        grad_norm = rate = 0.0
        if trained:
            (micro_batches,) = pack_for_ranks([documents], self._max_tokens, self.ranks, self._dtype)
            for batch in micro_batches:
                logprobs, _ = forward(self.model, batch, temperature=1.0)
                loss = -logprobs.sum() / trained
                total += loss.detach()
                self.ranks.backward(loss)
            update = self.optimizer.update()
            grad_norm, rate = update.grad_norm, update.learning_rate
        else:
            self.optimizer.skip()
        return SupervisedMetrics(
            loss=float(self.ranks.sum(total)),
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=tokens,
            num_trained_tokens=trained,
            seconds=time.perf_counter() - started,
        )
