"""Compares engines and trainer on the fresh tokens of the first batch and of the one after two updates, before training it.

The step's own log-probabilities are compared, so a batch without a fault costs nothing. Above the bound no update is made:
``MismatchError`` tells the mean difference, the bound with the types that decide it, the likely cause, the remedy and the ten
worst tokens. All ranks decide alike.

``Probes`` find the cause: they score the worst rows again, each time with one thing changed. The change with the smallest
difference is probably the one that the engine has made. Every method is a collective: all ranks make the same forward passes
in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import structlog
import torch
from jinja2 import TemplateError

from services.common.errors import RollmillError
from services.common.lora import adapter_off
from services.common.records import RankBatch, Segment, TrainingSequence
from services.common.system.machine import available_bytes
from services.trainer.model.micro_batches import Document, dummy_micro_batch, forward, logprob_dtype, pack
from services.trainer.ranks import HostGroup, full, local_rows, peer_loss, reshard
from services.trainer.step import TrainStep

log = structlog.get_logger(__name__)

# --- Other prompts that an engine may have read instead of a row's own: for ``probes``.


ONE_TOKEN, TEMPLATE = "one token more or less", "template"
SYSTEM = {"no": None, "an empty": "", "the usual": "You are a helpful assistant."}
Change = Callable[[list[int]], list[int]]


def prompt_changes(tokenizer: Any) -> list[tuple[str, str, Change]]:
    """Changes of a prompt's tokens, each with its cause and a label."""
    encoded = partial(tokenizer.encode, add_special_tokens=False)
    found: list[tuple[str, str, Change]] = [
        (TEMPLATE, "its text tokenised again", lambda ids: encoded(tokenizer.decode(ids))),
        (ONE_TOKEN, "without the first token", lambda ids: ids[1:]),
        (ONE_TOKEN, "without the last token", lambda ids: ids[:-1]),
        (ONE_TOKEN, "the first token twice", lambda ids: [*ids[:1], *ids]),
        (ONE_TOKEN, "the last token twice", lambda ids: [*ids, *ids[-1:]]),
    ]
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    for token in sorted({*special, *encoded("\n"), *encoded(" ")}):
        name = repr(tokenizer.decode([token]))
        found.append((ONE_TOKEN, f"{name} in front", lambda ids, token=token: [token, *ids]))  # type: ignore[misc]
        found.append((ONE_TOKEN, f"{name} behind", lambda ids, token=token: [*ids, token]))  # type: ignore[misc]
    if not getattr(tokenizer, "chat_template", None):
        return found

    def rendered(text: str, system: str | None = None, **settings: Any) -> str:
        turns = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": text}]
        settings = {"add_generation_prompt": True, **settings}
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))
        except TemplateError:  # of a template without system turns
            return ""

    begin, _, end = rendered("MARK").partition("MARK")

    def again(render: Callable[[str], str]) -> Change:
        """The prompt's only message rendered in another way."""
        return lambda ids: encoded(render(tokenizer.decode(ids).removeprefix(begin).removesuffix(end)))

    ways: dict[str, Callable[[str], str]] = {
        "without its template": lambda text: text,
        "without the opening of the answer": partial(rendered, add_generation_prompt=False),
        "without thinking": partial(rendered, enable_thinking=False),
        **{f"in its template, {name} system turn": partial(rendered, system=text) for name, text in SYSTEM.items()},
    }
    return [*found, *((TEMPLATE, label, again(render)) for label, render in ways.items())]


PROBED_ROWS = 8  # of each rank
PROBES_S = 120.0
MOST_PAIRS = 64  # of layers that are exchanged
LIKE_ROUNDING = 8.0  # a difference within this factor of rounding's own is rounding
ROPE_BASES = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
TEMPERATURES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5, 2.0, 4.0)
HALF = "half precision"
# Causes with their remedies. Of causes that explain the difference equally well, the first counts.
REMEDIES = {
    "packing": "rows leak into each other in the trainer: policies.{policy}.trainer.attention: sdpa, or a model that packs",
    "adapter not applied": "the engine computes the base alone: look for the adapter in the replica's log (docs/adapters.md)",
    "head of an older version": "an engine of your own has to prepare its head again after each update",
    "older weights": "the replica's weights are older than it says: `rollmill weights RUN`, weights.kept_old in its log",
    "temperature": "engine and trainer divide logits by different temperatures: both take sampling.temperature or the row's own",
    ONE_TOKEN: "the engine adds or drops a token of the prompt: add_bos_token and the like beside its tokenizer",
    TEMPLATE: "the engine's chat template or tokenizer is not that of policies.{policy}.model.path",
    "rope base": "rope_theta in the config.json of engine and policies.{policy}.model.path differ",
    "order of layers": "the engine's layers are exchanged: compare the names that it loads with the checkpoint's",
    HALF: "the engine rounds more than its settings say: inference.<name>.dtype and "
    "policies.{policy}.weights.publish_dtype: float32",
}  # fmt: skip
Weights = Mapping[str, torch.Tensor]  # this rank's rows


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """The best change of one cause."""

    rank: tuple[float, int]
    cause: str
    change: str
    after: float  # mean difference with the change


class Probes:
    """Probes of the worst rows of a batch's first minibatch."""

    def __init__(self, step: TrainStep, tokenizer: Any, batch: RankBatch, bound: float) -> None:
        self._step, self._lm, self._tokenizer, self._bound = step, step.model.causal_lm, tokenizer, bound
        self._fresh_version = batch.training_step - 1
        self._until = time.monotonic() + PROBES_S
        self._found: dict[str, Finding] = {}
        items = [item for item in batch.sequences if item.minibatch == 0]
        documents = list(map(_document, items))
        scores = self._score(documents)  # packed as in the step
        gaps = list(map(self._gaps, documents, scores))
        worst = sorted((i for i, gap in enumerate(gaps) if len(gap)), key=lambda i: -float(gaps[i].mean()))
        self._rows = [(items[i], documents[i], scores[i]) for i in worst[:PROBED_ROWS]]
        self.documents, self.scores = [d for _, d, _ in self._rows], [s for _, _, s in self._rows]
        self.before = self._mean(map(self._gaps, self.documents, self.scores))

    def run(self, earlier: Seq[tuple[int, Weights]], *, exact: bool) -> list[Finding]:
        """The best change of each cause, the likeliest first, as far as there was time. ``earlier``: older versions; ``exact``:
        engine and trainer should compute in float32."""
        self._try("packing", "each row alone", alone=True)
        self._weights(earlier, exact)
        self._search("temperature", TEMPERATURES, lambda factor: self._try(
            "temperature", f"{factor:.4g} times as high", [self._hotter(d, factor) for d in self.documents]))  # fmt: skip
        for cause, label, change in prompt_changes(self._tokenizer):
            changed = [_document(_with_prompt(item, change)) for item, _, _ in self._rows]
            if self._most([d.token_ids.tolist() for d in changed] != [d.token_ids.tolist() for d in self.documents]):
                self._try(cause, label, changed)
        self._rope()
        self._layers()
        reshard(self._step.model)
        return sorted(self._found.values())

    def fresh(self, document: Document) -> torch.Tensor:
        """Which trained tokens the newest version alone sampled."""
        fresh = (document.weight_versions == self._fresh_version) & ~document.mixed_cache
        return torch.from_numpy(fresh[document.loss_mask])

    # -- scores ------------------------------------------------------------------------------------------------------

    def _score(
        self,
        documents: Seq[Document],
        *,
        alone: bool = False,
    ) -> list[torch.Tensor]:
        """Log-probabilities of each document's trained tokens."""
        groups = [(i, [d]) for i, d in enumerate(documents)] if alone else [(0, documents)]
        place = self._step.ranks.device, logprob_dtype(self._step.model)
        packed = [(first, micro) for first, group in groups for micro in pack(group, self._step.max_tokens, *place)]
        packed += [(0, dummy_micro_batch(*place))] * (self._most(len(packed)) - len(packed))
        found = [torch.zeros(0) for _ in documents]
        for first, batch in packed:
            scores, *_ = forward(self._step.model, batch, self._step.temperature)
            for own, source in enumerate(batch.sources):
                if not batch.is_dummy:
                    found[first + source] = scores[batch.sequence_index == own].float().cpu()
            self._step.on_progress()
        return found

    def _gaps(self, document: Document, scores: torch.Tensor) -> torch.Tensor:
        """|trainer - engine| of the fresh tokens."""
        return (scores - torch.from_numpy(document.behaviour[document.loss_mask])).abs()[self.fresh(document)]

    def _mean(self, gaps: Iterable[torch.Tensor]) -> float:
        own = torch.cat([torch.zeros(0), *gaps])
        total, count = self._step.ranks.sum(
            torch.tensor([own.sum(), len(own)], device=self._step.ranks.device)
        ).tolist()
        return float(total / count) if count else math.inf

    def _most(self, value: float) -> int:
        return self._step.ranks.max(int(value))[0]

    def _try(self, cause: str, label: str, documents: Seq[Document] | None = None, *, alone: bool = False) -> float:
        """The mean difference with a change; infinite without time."""
        if self._most(time.monotonic() > self._until):
            return math.inf
        changed = self.documents if documents is None else documents
        with _skipping(cause, label):
            return self._note(cause, label, self._mean(map(self._gaps, changed, self._score(changed, alone=alone))))
        return math.inf

    def _note(self, cause: str, label: str, after: float) -> float:
        found = Finding((max(after, self._bound / 2), list(REMEDIES).index(cause)), cause, label, after)
        self._found[cause] = min(found, self._found.get(cause, found))
        return after

    def _search(self, cause: str, grid: Seq[float], differs: Callable[[float], float]) -> None:
        """The best of some factors, then of some between its neighbours."""
        tried = {1.0: self.before, **{value: differs(value) for value in grid}}
        for _ in range(5):
            values, best = sorted(tried), min(tried, key=tried.__getitem__)
            at = values.index(best)
            tried |= {x: differs(x) for v in values[max(0, at - 1) : at + 2] if (x := math.sqrt(best * v)) not in tried}

    # -- changes -----------------------------------------------------------------------------------------------------

    def _weights(self, earlier: Seq[tuple[int, Weights]], exact: bool) -> None:
        model, head = self._step.model, self._lm.get_output_embeddings().weight
        if model.adapter is not None:
            with adapter_off(model):
                self._try("adapter not applied", "the base alone")
        for version, weights in reversed(earlier):
            newest = self._exchange(weights)
            self._try("older weights", f"version {version}")
            older = full(head).detach().clone()
            self._exchange(newest)
            with self._head(older):
                self._try("head of an older version", f"version {version}")
        for half in (torch.bfloat16, torch.float16) if exact else ():
            with _skipping(HALF, str(half)):
                with torch.autocast(self._step.ranks.device.type, half):
                    scores = self._score(self.documents)
                after = self._mean(map(self._gaps, self.documents, scores))
                moved = [(new - row[2]).abs()[self.fresh(row[1])] for new, row in zip(scores, self._rows, strict=True)]
                own = self._mean(moved)
                # No rounding repeats another: its size tells.
                if own / LIKE_ROUNDING < self.before < own * LIKE_ROUNDING:
                    after = min(after, self.before / 2.01)
                self._note(HALF, f"products in {half}, which moves the trainer by {own:.2g}", after)

    def _hotter(self, document: Document, factor: float) -> Document:
        own = np.full(document.num_tokens, math.nan) if document.temperatures is None else document.temperatures
        return replace(document, temperatures=np.where(np.isnan(own), self._step.temperature, own) * factor)

    def _rope(self) -> None:
        tables = [m.inv_freq for m in self._lm.modules() if len(getattr(m, "inv_freq", ())) > 1]
        own = [table.clone() for table in tables]
        if not own:
            return
        base = float(own[0][-1]) ** (-len(own[0]) / (len(own[0]) - 1))

        def differs(factor: float) -> float:
            for table, frequencies in zip(tables, own, strict=True):
                table.copy_(frequencies ** (math.log(base * factor) / math.log(base)))
            return self._try("rope base", f"{base * factor:.4g} instead of {base:.4g}")

        self._search("rope base", [other / base for other in ROPE_BASES if abs(other / base - 1) > 0.01], differs)
        for table, frequencies in zip(tables, own, strict=True):
            table.copy_(frequencies)

    def _layers(self) -> None:
        layers = self._step.model.layers
        pairs = [(i, i + by) for by in range(1, len(layers)) for i in range(len(layers) - by)][:MOST_PAIRS]
        for parent in (m for m in self._lm.modules() if isinstance(m, torch.nn.ModuleList) and list(m) == layers):
            for i, j in pairs:
                parent[i], parent[j] = layers[j], layers[i]
                self._try("order of layers", f"{i} and {j} exchanged")
                parent[i], parent[j] = layers[i], layers[j]

    def _exchange(self, weights: Weights) -> Weights:
        """Give the model other weights; returns those before."""
        reshard(self._step.model)
        rows = {name: local_rows(weight)[0] for name, weight in self._step.model.published().items()}
        own = {name: row.detach().to("cpu", copy=True) for name, row in rows.items()}
        for name, row in rows.items():
            row.copy_(weights[name])
        return own

    @contextmanager
    def _head(self, weight: torch.Tensor) -> Iterator[None]:
        """The model with another head, whole on each rank."""
        self._lm.get_output_embeddings = lambda: SimpleNamespace(weight=weight)
        yield
        del self._lm.get_output_embeddings


@contextmanager
def _skipping(cause: str, label: str) -> Iterator[None]:
    """An error leaves out one probe, not the explanation; a lost rank or device ends the trainer."""
    try:
        yield
    except Exception as error:
        if peer_loss(error) is not None or isinstance(error, torch.AcceleratorError):
            raise
        log.warning("numerics.probe_failed", cause=cause, change=label, error=f"{type(error).__name__}: {error}")


def _document(item: TrainingSequence) -> Document:
    return replace(Document.from_training_sequence(item, 0.0), teacher=None)


def _with_prompt(item: TrainingSequence, change: Change) -> TrainingSequence:
    """The row with other tokens before its first trained one."""
    segments = [segment for segment in item.sequence.segments if segment.num_tokens]
    first = next(i for i, segment in enumerate(segments) if segment.is_policy)
    prompt = np.concatenate([segment.token_ids for segment in segments[:first]]).tolist()
    changed = Segment.environment(np.array(change(prompt) or prompt))
    return replace(item, sequence=replace(item.sequence, segments=(changed, *segments[first:])))


# --- The comparison of engine and trainer.


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
        if not self._step.ranks.max(size > available_bytes())[0]:
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
