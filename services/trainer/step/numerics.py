"""Compares engines and trainer on the fresh tokens of the first batch and of the one after two updates, before training it.

The step's own log-probabilities are compared, so a batch without a fault costs nothing. Above the bound no update is made:
``MismatchError`` tells the mean difference, the bound with the types that decide it, the likely cause (``probes``), the
remedy and the ten worst tokens. All ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import structlog
import torch

from services.common.errors import RollmillError
from services.common.records.types import RankBatch
from services.common.system.memory import available_bytes
from services.trainer.data.packing import Document
from services.trainer.ranks.sharding import HostGroup, local_rows
from services.trainer.step.probes import REMEDIES, Probes, Weights
from services.trainer.step.train_step import TrainStep

log = structlog.get_logger(__name__)

LEAST_TOKENS = 16  # fresh ones in a comparison: the mean of fewer is noise in bfloat16
UPDATES_BETWEEN = 2  # after so many a replica has had to take new weights
PROBED_SEQUENCES = 8  # of each rank
WORST_TOKENS = 10
COPIES_SHARE = 4  # copies of weights take at most this part of the free memory
UNKNOWN = "no probe explains the difference: other weights, other kernels or a quantized engine"


class MismatchError(RollmillError):
    """Engine and trainer disagree; nothing was trained."""


class NumericsGate:
    """The comparisons of one trainer's life. Resumed, it compares again: the replicas are new as well."""

    def __init__(
        self,
        step: TrainStep,
        tokenizer: Any,
        *,
        policy: str,
        bound: float,
        types: Mapping[str, str],
        publish_dtype: str,
    ) -> None:
        """``types`` are the types that decide ``bound``, by their keys in the recipe."""
        self._step, self._model, self._ranks, self._tokenizer = step, step.model, step.ranks, tokenizer
        self._policy, self._bound, self._types = policy, bound, types
        self._published: torch.dtype = getattr(torch, publish_dtype)
        self._num_batches, self._next, self._left = 0, 0, 0 if math.isinf(bound) else 2
        self._earlier: list[tuple[int, Weights]] = []

    def check(self, batch: RankBatch, difference: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Compare a batch before its first update, if a comparison is due. ``difference`` is the sum of |trainer - engine|
        over the ``num_tokens`` fresh tokens of this rank's share of the first minibatch. A collective.

        Raises:
            MismatchError: the mean is above the bound.
        """
        if not self._left:
            return
        total, count = self._ranks.sum(torch.stack([difference, num_tokens])).tolist()
        if self._num_batches >= self._next and count >= LEAST_TOKENS:
            if not total / count <= self._bound:  # also NaN
                raise MismatchError(self._explained(batch, total / count, int(count)))
            log.info(
                "numerics.agree", step=batch.training_step, mean=total / count, bound=self._bound, tokens=int(count)
            )
            self._left -= 1
            self._next = self._num_batches + UPDATES_BETWEEN
        self._num_batches += 1
        if self._left == 1 and len(self._earlier) < UPDATES_BETWEEN:
            self._keep_weights(batch.training_step - 1)
        elif not self._left:
            self._earlier.clear()

    def _keep_weights(self, version: int) -> None:
        """Copy the weights that the batch starts from, unless a rank has no room: a replica may still have them later."""
        rows = {name: local_rows(weight)[0].detach() for name, weight in self._model.published().items()}
        size = sum(row.numel() for row in rows.values()) * self._published.itemsize * self._ranks.world_size
        lacks = torch.tensor(int(size * COPIES_SHARE > available_bytes()), device=self._ranks.device)
        if not int(self._ranks.max(lacks)):
            copies = {name: row.to("cpu", self._published, copy=True) for name, row in rows.items()}
            self._earlier.append((version, copies))

    @torch.no_grad()
    def _explained(self, batch: RankBatch, mean: float, count: int) -> str:
        probes = Probes(
            self._step,
            self._tokenizer,
            fresh_version=batch.training_step - 1,
            bound=self._bound,
            types=set(self._types.values()),
            earlier=self._earlier,
        )
        items = [item for item in batch.sequences if item.minibatch == 0]
        documents = [replace(Document.from_training_sequence(item, 0.0), teacher=None) for item in items]
        scores = probes.score(documents)
        gaps = [probes.gaps(document, score) for document, score in zip(documents, scores, strict=True)]
        worst = sorted((i for i, gap in enumerate(gaps) if len(gap)), key=lambda i: -float(gaps[i].mean()))
        chosen = worst[:PROBED_SEQUENCES]
        documents, scores = [documents[i] for i in chosen], [scores[i] for i in chosen]
        before = probes.mean([gaps[i] for i in chosen])
        found = probes.run(documents, scores, before)
        log.error(
            "numerics.mismatch", mean=mean, bound=self._bound, probes=[(f.cause, f.change, f.after) for f in found]
        )
        likely, remedy = UNKNOWN, "the same model directory and dtype, and an engine without quantization"
        if found and found[0].after < before / 2:
            best = found.pop(0)
            likely = f"{best.cause} ({best.change}: the difference falls from {before:.2g} to {best.after:.2g})"
            remedy = REMEDIES[best.cause].format(policy=self._policy)
        types = ", ".join(f"{key} {dtype}" for key, dtype in self._types.items())
        others = "; ".join(f"{f.cause} ({f.change}): {f.after:.2g}" for f in found[:4])
        return (
            f"engine and trainer of {self._policy} disagree by {mean:.2g} nats a token, more than {self._bound:g} (mean over "
            f"{count} fresh tokens of step {batch.training_step}; {types}): the batch is not trained. Likely cause: {likely}. "
            f"Remedy: {remedy}; then start another run, because this one has recorded the engine's tokens. To accept the "
            f"difference: rollmill run --resume RUN --set policies.{self._policy}.trainer.max_mismatch={2 * mean:.2g}. Other "
            f"probes: {others}. Worst tokens (trainer, engine): {self._worst(probes, documents, scores)}"
        )

    def _worst(self, probes: Probes, documents: Seq[Document], scores: Seq[torch.Tensor]) -> str:
        """The tokens with the largest difference over all ranks, each with the text before it."""
        tokens = []
        for document, score in zip(documents, scores, strict=True):
            places = np.flatnonzero(document.loss_mask)
            for index in torch.nonzero(probes.fresh(document)).flatten().tolist():
                at, own, engine = int(places[index]), float(score[index]), float(document.behaviour[places[index]])
                tokens.append((abs(own - engine), own, engine, document.token_ids[: at + 1][-6:].tolist()))
        tokens = sorted(tokens, key=lambda token: -token[0])[:WORST_TOKENS]
        parts = HostGroup(self._ranks).gather(orjson.dumps(tokens).decode(), "collecting the worst tokens")
        ordered = sorted(
            (token for part in parts for token in orjson.loads(part)), key=lambda token: -(token[0] or 0.0)
        )
        return ", ".join(
            f"{self._tokenizer.decode(ids[:-1])!r} then {self._tokenizer.decode(ids[-1:])!r} ({own or math.nan:.2f}, "
            f"{engine or math.nan:.2f})"
            for _, own, engine, ids in ordered[:WORST_TOKENS]
        )
