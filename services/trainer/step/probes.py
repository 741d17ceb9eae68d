"""Finds why engine and trainer disagree: scores some rows again, each time with one thing changed.

The change with the smallest difference is probably the one that the engine has made. Every rank makes the same forward
passes in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from services.common.lora import adapter_off
from services.trainer.data.packing import Document, dummy_micro_batch, pack
from services.trainer.ranks.sharding import full, local_rows
from services.trainer.step.micro_batches import MicroTensors, forward, logprob_dtype
from services.trainer.step.other_rows import ONE_TOKEN, TEMPLATE, prompt_changes, shifted, with_prompt
from services.trainer.step.train_step import TrainStep

PROBES_S = 120.0
MOST_PAIRS = 64  # of layers that are exchanged
LIKE_ROUNDING = 4.0  # a difference within this factor of rounding's own is rounding
ROPE_BASES = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
TEMPERATURES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5, 2.0, 4.0)

# Causes with their remedies, the special ones before those that they are a case of: the first of equal probes counts.
REMEDIES = {
    "packing": "the trainer's packed rows leak between sequences: policies.{policy}.trainer.attention: sdpa, or a model "
    "whose layers all know documents (docs/trainer.md)",
    "adapter not applied": "the engine computes the base alone: look for the adapter in the replica's log (docs/adapters.md)",
    "head of an older version": "the engine's head does not follow the weights: with an engine of your own, prepare the head "
    "again after each update",
    "older weights": "the replica computes with older weights than it says: `rollmill weights RUN`, and weights.kept_old "
    "in its log",
    "temperature": "the engine scales logits by another temperature than sampling.temperature",
    "tokens shifted by one": "the engine reports each log-probability for the token before or behind",
    ONE_TOKEN: "the engine puts a token before or behind the prompt, or leaves one out: add_bos_token and "
    "the like in its tokenizer's settings",
    TEMPLATE: "the engine reads another prompt than the row has: its chat template or tokenizer is not the one of "
    "policies.{policy}.model.path",
    "rope base": "rope_theta (rope_parameters) of the engine's config.json is not the trainer's",
    "positions": "the engine counts positions in another way than from 0 for each sequence",
    "order of layers": "the engine computes with exchanged or missing layers: compare its loader's names with the checkpoint",
    "head in float32": "the engine computes the head in float32 and the trainer does not: accept the difference",
    "half precision": "the engine computes in a smaller type than its settings say: inference.<name>.dtype: float32, and "
    "policies.{policy}.weights.publish_dtype: float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """The best change of one cause."""

    rank: tuple[float, int]
    cause: str
    change: str
    after: float  # mean difference with the change


Weights = Mapping[str, torch.Tensor]  # this rank's rows


class Probes:
    """Probes of one batch."""

    def __init__(
        self,
        step: TrainStep,
        tokenizer: Any,
        *,
        fresh_version: int,
        bound: float,
        types: Collection[str],
        earlier: Seq[tuple[int, Weights]] = (),
    ) -> None:
        """``types`` are those in which engine and trainer should compute; ``earlier`` are weights of older versions."""
        self._step, self._model, self._lm = step, step.model, step.model.causal_lm
        self._ranks, self._tokenizer = step.ranks, tokenizer
        self._fresh_version, self._bound, self._types, self._earlier = fresh_version, bound, types, earlier
        self._until = time.monotonic() + PROBES_S
        self._found: dict[str, Finding] = {}

    def score(
        self,
        documents: Seq[Document],
        *,
        alone: bool = False,
        temperature: float = 1.0,
        change: Callable[[MicroTensors], MicroTensors] = lambda batch: batch,
    ) -> list[torch.Tensor]:
        """Log-probabilities of each document's trained tokens. ``temperature`` is a factor on every token's own."""
        groups = [(i, [d]) for i, d in enumerate(documents)] if alone else [(0, documents)]
        packed = [(first, micro) for first, group in groups for micro in pack(group, self._step.max_tokens)]
        most = int(self._ranks.max(torch.tensor(len(packed), device=self._ranks.device)))
        found = [torch.zeros(0) for _ in documents]
        for first, micro in [*packed, *[(0, dummy_micro_batch())] * (most - len(packed))]:
            batch = MicroTensors.from_packed(micro, self._ranks.device, logprob_dtype(self._model))
            if batch.drawn is not None and batch.drawn.temperatures is not None:
                drawn = replace(batch.drawn, temperatures=batch.drawn.temperatures * temperature)
                batch = replace(batch, drawn=drawn)
            scores = forward(self._model, change(batch), self._step.temperature * temperature)[0].float().cpu()
            for place, source in enumerate(micro.sources.tolist()):
                if source >= 0:
                    found[first + source] = scores[torch.from_numpy(micro.document_index == place)]
            self._step.on_progress()
        return found

    def fresh(self, document: Document) -> torch.Tensor:
        """Which trained tokens the newest version alone sampled."""
        fresh = (document.weight_versions == self._fresh_version) & ~document.mixed_cache
        return torch.from_numpy(fresh[document.loss_mask])

    def gaps(self, document: Document, scores: torch.Tensor) -> torch.Tensor:
        """|trainer - engine| of the fresh tokens."""
        return (scores - torch.from_numpy(document.behaviour[document.loss_mask])).abs()[self.fresh(document)]

    def mean(self, gaps: Seq[torch.Tensor]) -> float:
        own = torch.cat([*gaps, torch.zeros(0)]).double()
        total, count = self._ranks.sum(
            torch.tensor([float(own.sum()), len(own)], dtype=torch.float64, device=self._ranks.device)
        ).tolist()
        return total / max(count, 1.0)

    def run(self, documents: Seq[Document], scores: Seq[torch.Tensor], before: float) -> list[Finding]:
        """The best change of each cause, the likeliest first; none of those for which there was no time.

        ``scores`` are of the packed rows as they were to be trained, ``before`` is their mean difference."""
        self._documents, self._scores, self._before = documents, scores, before
        self._try("packing", "each sequence alone", alone=True)
        self._weights()
        self._search("temperature", TEMPERATURES, lambda factor: {"temperature": factor})
        self._alignment()
        self._prompts()
        self._rope()
        for label, change in (("from 1", _from_one), ("restarted behind the prompt", _restarted)):
            self._try("positions", f"positions {label}", alone=True, change=change)
        self._layers()
        return sorted(self._found.values())

    @property
    def _late(self) -> bool:
        late = torch.tensor(int(time.monotonic() > self._until), device=self._ranks.device)
        return bool(self._ranks.max(late))

    def _try(self, cause: str, label: str, documents: Seq[Document] | None = None, **score: Any) -> float:
        """The mean difference with a change; infinite when there is no time left."""
        if self._late:
            return math.inf
        changed = self._documents if documents is None else documents
        scores = self.score(changed, **score)
        after = self.mean([self.gaps(d, s) for d, s in zip(changed, scores, strict=True)])
        self._note(cause, label, after)
        return after

    def _note(self, cause: str, label: str, after: float, weight: float = 1.0) -> None:
        # What lies far below the bound is rounding: such changes explain equally well, and the special cause counts.
        rank = (max(after * weight, self._bound / 2), list(REMEDIES).index(cause))
        if math.isfinite(after) and (cause not in self._found or rank < self._found[cause].rank):
            self._found[cause] = Finding(rank, cause, label, after)

    def _search(self, cause: str, grid: Seq[float], settings: Callable[[float], dict[str, Any]]) -> None:
        """The best of some factors, then of those between its neighbours."""
        tried = {value: self._try(cause, f"{cause} x {value:.3g}", **settings(value)) for value in grid}
        for _ in range(5):
            values = sorted({1.0, *tried})
            best = min(tried, key=tried.__getitem__)
            at = values.index(best)
            for other in values[max(0, at - 1) : at + 2]:
                between = math.sqrt(best * other)
                if between not in tried:
                    tried[between] = self._try(cause, f"{cause} x {between:.4g}", **settings(between))

    def _weights(self) -> None:
        head = self._lm.get_output_embeddings().weight
        if self._model.adapter is not None:
            with adapter_off(self._model):
                self._try("adapter not applied", "the base without the adapter")
        for version, weights in reversed(self._earlier):
            with self._holding(weights):
                self._try("older weights", f"the weights of version {version}")
                older = full(head).detach().clone()
            if self._model.adapter is None:
                with self._head(older):
                    self._try("head of an older version", f"the head of version {version}")
        if "bfloat16" in self._types:
            with self._head(full(head).detach().float()):
                self._try("head in float32", "the head in float32")
            return
        for half in (torch.bfloat16, torch.float16):
            rounded = {name: local_rows(w)[0].to("cpu", half) for name, w in self._model.published().items()}
            with self._holding(rounded):
                scores = self.score(self._documents)
            documents = zip(self._documents, scores, self._scores, strict=True)
            own = self.mean([(new - old).abs()[self.fresh(d)] for d, new, old in documents])
            alike = 1 / LIKE_ROUNDING < self._before / max(own, 1e-12) < LIKE_ROUNDING
            pairs = zip(self._documents, scores, strict=True)
            after = self.mean([self.gaps(d, s) for d, s in pairs])
            name = str(half).removeprefix("torch.")
            # Rounding elsewhere is noise that no rounding here repeats, so its size is the evidence.
            self._note("half precision", f"weights rounded to {name}, which moves the trainer by {own:.2g},",
                       min(after, self._before / 2.01) if alike else after)  # fmt: skip

    def _alignment(self) -> None:
        for by in (1, -1):
            self._try("tokens shifted by one", f"log-probabilities {by:+d}", [shifted(d, by) for d in self._documents])

    def _prompts(self) -> None:
        for cause, label, change in prompt_changes(self._tokenizer):
            changed = [with_prompt(document, change) for document in self._documents]
            differs = any(new is not old for new, old in zip(changed, self._documents, strict=True))
            if int(self._ranks.max(torch.tensor(int(differs), device=self._ranks.device))):
                self._try(cause, label, changed)

    def _rope(self) -> None:
        modules = [m for m in self._lm.modules() if len(getattr(m, "inv_freq", ())) > 1]
        if not modules:
            return
        own = [m.inv_freq.clone() for m in modules]
        base = float(own[0][-1]) ** (-len(own[0]) / (len(own[0]) - 1))

        def settings(factor: float) -> dict[str, Any]:
            for module, frequencies in zip(modules, own, strict=True):
                module.inv_freq.copy_(frequencies ** (math.log(base * factor) / math.log(base)))
            return {}

        try:
            self._search("rope base", [other / base for other in ROPE_BASES if abs(other / base - 1) > 0.01], settings)
        finally:
            settings(1.0)

    def _layers(self) -> None:
        lists = [m for m in self._lm.modules() if isinstance(m, torch.nn.ModuleList) and list(m) == self._model.layers]
        if not lists or len(self._model.layers) < 2:
            return
        count = len(self._model.layers)
        pairs = [(i, j) for span in range(1, count) for i in range(count) if (j := i + span) < count][:MOST_PAIRS]
        orders = [(f"layers {i} and {j} exchanged", {i: j, j: i}) for i, j in pairs]
        own = lists[0]._modules
        for label, moved in orders:
            with _replaced(own, {str(i): self._model.layers[j] for i, j in moved.items()}):
                self._try("order of layers", label)

    @contextmanager
    def _holding(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The model with other weights, of which ``weights`` are this rank's rows."""
        rows = {name: local_rows(weight)[0] for name, weight in self._model.published().items()}
        own = {name: row.detach().to("cpu", copy=True) for name, row in rows.items()}
        try:
            for name, row in rows.items():
                row.copy_(weights[name])
            yield
        finally:
            for name, row in rows.items():
                row.copy_(own[name])

    @contextmanager
    def _head(self, weight: torch.Tensor) -> Iterator[None]:
        """The model with another head, whole on each rank."""
        self._lm.get_output_embeddings = lambda: SimpleNamespace(weight=weight)
        try:
            yield
        finally:
            del self._lm.get_output_embeddings


@contextmanager
def _replaced(modules: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    own = dict(modules)
    modules.update(others)
    try:
        yield
    finally:
        modules.update(own)


def _from_one(batch: MicroTensors) -> MicroTensors:
    return replace(batch, position_ids=batch.position_ids + 1)


def _restarted(batch: MicroTensors) -> MicroTensors:
    """Positions from 0 again behind the prompt of the only document."""
    if not batch.num_targets:
        return batch
    start = int(batch.targets.predecessors.min()) + 1
    positions = batch.position_ids
    return replace(batch, position_ids=torch.where(positions < start, positions, positions - start))
