"""Compares engines and trainer on the fresh tokens of the first batch and of the one after two updates, before training it.

The step's own log-probabilities are compared, so a batch without a fault costs nothing. Above the bound no update is made:
``MismatchError`` tells the mean difference, the bound with the types that decide it, the likely cause (``probes``), the
remedy and the ten worst tokens. All ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import structlog
import torch

from services.common.errors import RollmillError
from services.common.records import RankBatch
from services.common.system.machine import available_bytes
from services.trainer.probes import HALF, REMEDIES, Probes, Weights
from services.trainer.ranks import HostGroup, local_rows
from services.trainer.step import TrainStep

log = structlog.get_logger(__name__)
LEAST_TOKENS = 16  # fresh ones in a comparison: the mean of fewer is noise in bfloat16
UPDATES_BETWEEN = 2  # after so many a replica has had to take new weights
WORST_TOKENS = 10
REMAINDER = 20  # a change that leaves more than so many bounds is not the cause
COPIES_KEPT = 8  # batches for which copies wait for enough fresh tokens
COPIES_SHARE = 4  # copies of weights take at most this part of the free memory


class MismatchError(RollmillError):
    """Engine and trainer disagree; nothing was trained."""


class NumericsGate:
    """The comparisons of one trainer's life. Resumed, it compares again: the replicas are new as well."""

    def __init__(self, step: TrainStep, tokenizer: Any, policy: str, bound: float, types: Mapping[str, str]) -> None:
        """``types`` are the types that decide ``bound``, by their keys in the recipe."""
        self._step, self._tokenizer, self._policy, self._bound, self._types = step, tokenizer, policy, bound, types
        self._num_batches, self._next = 0, 0
        self.left = 0 if math.isinf(bound) else 2  # comparisons to come
        self._earlier: list[tuple[int, Weights]] = []

    def check(self, batch: RankBatch, difference: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Compare a batch before its first update, if a comparison is due. ``difference`` is the sum of |trainer - engine|
        over the ``num_tokens`` fresh tokens of this rank's share of the first minibatch. A collective.

        Raises:
            MismatchError: the mean is above the bound.
        """
        total, count = self._step.ranks.sum(torch.stack([difference, num_tokens])).tolist()
        if self._num_batches >= self._next and count >= LEAST_TOKENS:
            if not total / count <= self._bound:  # also NaN
                self._step.optimizer.adamw.zero_grad(set_to_none=True)
                raise MismatchError(self._explained(batch, total / count, int(count)))
            log.info("numerics.agree", step=batch.training_step, mean=total / count, bound=self._bound, tokens=count)
            self.left, self._next = self.left - 1, self._num_batches + UPDATES_BETWEEN
        self._num_batches += 1
        if self.left == 1 and self._num_batches <= self._next:
            self._keep_weights(batch.training_step - 1)
        elif not self.left or self._num_batches > self._next + COPIES_KEPT:
            self._earlier.clear()

    def _keep_weights(self, version: int) -> None:
        """Copy the weights that the batch starts from, unless a rank has no room: a replica may still have them later."""
        rows = {name: local_rows(weight)[0].detach() for name, weight in self._step.model.published().items()}
        size = sum(row.nbytes for row in rows.values()) * self._step.ranks.world_size * COPIES_SHARE
        lacks = torch.tensor(int(size > available_bytes()), device=self._step.ranks.device)
        if not int(self._step.ranks.max(lacks)):
            self._earlier.append((version, {name: row.to("cpu", copy=True) for name, row in rows.items()}))

    @torch.no_grad()
    def _explained(self, batch: RankBatch, mean: float, count: int) -> str:
        probes = Probes(self._step, self._tokenizer, batch, self._bound)
        found = probes.run(self._earlier, exact=set(self._types.values()) == {"float32"})
        log.error(
            "numerics.mismatch", mean=mean, bound=self._bound, probes=[(f.cause, f.change, f.after) for f in found]
        )
        likely = "no probe explains it. Remedy: the same model directory, kernels of the same type, no quantization"
        # Rounding repeats no other rounding, so there the size alone tells; any other cause has to leave little.
        most = math.inf if found and found[0].cause == HALF else REMAINDER * self._bound
        if found and found[0].after < min(most, probes.before / 2):
            best = found.pop(0)
            likely = (
                f"{best.cause} ({best.change}: the difference falls from {probes.before:.2g} to {best.after:.2g}). Remedy: "
                + REMEDIES[best.cause].format(policy=self._policy)
            )
        types = ", ".join(f"{key} {dtype}" for key, dtype in self._types.items())
        others = "; ".join(f"{f.cause} ({f.change}): {f.after:.2g}" for f in found[:4])
        return (
            f"engine and trainer of {self._policy} disagree by {mean:.2g} nats a token, more than {self._bound:g} (mean over "
            f"{count:.0f} fresh tokens of step {batch.training_step}; {types}): the batch is not trained. Likely cause: "
            f"{likely}; then start another run, because this one has recorded the engine's tokens. To accept the difference: "
            f"rollmill run --resume RUN --set policies.{self._policy}.trainer.max_mismatch={2 * mean:.2g}. Other probes: "
            f"{others}. Worst tokens (trainer, engine): {self._worst(probes)}"
        )

    def _worst(self, probes: Probes) -> str:
        """The tokens with the largest difference over all ranks, each with the text before it."""
        tokens = []
        for document, scores in zip(probes.documents, probes.scores, strict=True):
            trained = zip(np.flatnonzero(document.loss_mask), scores.tolist(), probes.fresh(document), strict=True)
            for at, own in [(at, own) for at, own, fresh in trained if fresh]:
                engine, ids = float(document.behaviour[at]), document.token_ids[: at + 1][-6:].tolist()
                text = f"{self._text(ids[:-1])} then {self._text(ids[-1:])} ({own:.2f}, {engine:.2f})"
                tokens.append((float(np.nan_to_num(abs(own - engine), nan=1e9)), text))
        own = orjson.dumps(sorted(tokens, reverse=True)[:WORST_TOKENS]).decode()
        parts = HostGroup(self._step.ranks).gather(own, "collecting the worst tokens")
        everywhere = sorted((token for part in parts for token in orjson.loads(part)), reverse=True)
        return ", ".join(text for _, text in everywhere[:WORST_TOKENS])

    def _text(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids))
