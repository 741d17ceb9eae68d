"""Checks a rank's share of a batch, packs its documents into micro-batches under a token budget, and gives the statistics
that a loss needs over all micro-batches.

The orchestrator checks records when they arrive, but may not know the vocabulary of a model on another machine yet. The
check here finds unknown ids before an embedding looks them up. A fault on one rank raises on every rank.

A row holds the tokens of the forward pass: the tokens of each document before its last trained token (the last one has no
trained successor), and shared beginnings of several documents once. The budget counts these tokens. Values of a trained
token (log-probability, advantage, ...) are stored for each document.

The hidden state of a token depends only on the preceding tokens: not on their sampler, their temperature or their mask.
So two documents have the same states as far as their token ids agree. Sorted by token ids, each document has its longest
common beginning with the previous one, and the row is the documents' tree in preorder.

First-fit decreasing over families of documents with a common beginning, deterministic for any budget. A family larger
than the budget is cut, and each part has the beginning once. A document longer than the budget gets its own micro-batch.
No document is dropped, cut or doubled. Documents without a common beginning come first, longest first and ties in the
given order, so that those of equal length are neighbours and attention needs one call for them.

Every rank has the same number of micro-batches. The RL step and the supervised step use them; a loss needs the statistics,
over all micro-batches and ranks, before its first gradient:

    tokens that are kept (rejection, m2po_mask) -> denominators -> M2PO's trust region, mean weight

Computed over the minibatch, so that the gradient depends neither on packing nor on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.common.config.algorithm import AlgorithmConfig, M2po, M2poMask, Tis
from services.common.errors import InvalidRequestError
from services.common.kept_tokens import KeptSets, unpack
from services.common.records import Logprobs, MinibatchTotals, RankBatch, TokenIds, TrainingSequence
from services.trainer.losses import (
    Algorithm,
    TokenBatch,
    TrustRegion,
    binding_second_moments,
    clamped,
    importance_weights,
    kept_by,
    largest_kept,
    sequence_lengths,
    truncated,
    trust_region,
    weight_sum,
)
from services.trainer.model.attention import Branch, Documents, Ints
from services.trainer.model.logprobs import Drawn, KeptBlocks, Targets
from services.trainer.ranks import Ranks

Bools = npt.NDArray[np.bool_]
NO_VERSION = -1
# A document joins a family only if at least this share of its tokens is common. Below this share, attention over the rows
# of another document costs more than the saved rows.
WORTHWHILE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One sequence for the trainer: its tokens, and a mask of the trained ones."""

    token_ids: TokenIds  # [num_tokens] int32
    loss_mask: Bools  # [num_tokens]
    behaviour: Logprobs  # [num_tokens] float32, 0 where the mask is false
    weight_versions: Ints  # [num_tokens], NO_VERSION where the mask is false
    mixed_cache: Bools  # [num_tokens], sampled on a KV cache that older weights had computed in part
    advantage: float = 0.0
    kept: KeptSets | None = None  # of all tokens; None: each trained one was drawn from the whole vocabulary
    temperatures: npt.NDArray[np.float64] | None = None  # [num_tokens], NaN where it is the recipe's; None: everywhere
    teacher: Logprobs | None = None  # [num_tokens] by the policy's teacher, 0 where the mask is false; None: not asked

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def computed(self) -> TokenIds:
        """The tokens before the last trained one. Empty without a trained token."""
        trained = np.flatnonzero(self.loss_mask)
        return self.token_ids[: trained[-1]] if len(trained) else self.token_ids[:0]

    @classmethod
    def supervised(cls, token_ids: TokenIds, loss_mask: Bools, name: str = "document") -> Document:
        """A demonstration: every token in the mask is a target, regardless of its author."""
        num_tokens = len(token_ids)
        if len(loss_mask) != num_tokens:
            raise InvalidRequestError(f"{name} has {num_tokens} tokens but a loss mask of {len(loss_mask)}")
        _check_first_token(loss_mask, name)
        return cls(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            loss_mask=np.asarray(loss_mask, dtype=np.bool_),
            behaviour=np.zeros(num_tokens, dtype=np.float32),
            weight_versions=np.full(num_tokens, NO_VERSION, dtype=np.int64),
            mixed_cache=np.zeros(num_tokens, dtype=np.bool_),
        )

    @classmethod
    def from_training_sequence(cls, item: TrainingSequence, advantage: float) -> Document:
        """Concatenate the segments, with exactly the sampled token ids: no text is tokenised again."""
        segments = [s for s in item.sequence.segments if s.num_tokens]
        num_tokens = sum(s.num_tokens for s in segments)
        loss_mask = np.zeros(num_tokens, dtype=np.bool_)
        behaviour = np.zeros(num_tokens, dtype=np.float32)
        weight_versions = np.full(num_tokens, NO_VERSION, dtype=np.int64)
        mixed_cache = np.zeros(num_tokens, dtype=np.bool_)
        start = 0
        for segment in segments:
            end = start + segment.num_tokens
            if segment.is_policy:
                loss_mask[start:end] = True
                behaviour[start:end] = segment.logprobs
                weight_versions[start:end] = segment.weight_version
                mixed_cache[start:end] = segment.mixed_cache
            start = end
        _check_first_token(loss_mask, f"sequence {item.sequence_id}")
        kept = temperatures = None
        if any(s.kept for s in segments):
            try:
                kept = KeptSets.concatenated([unpack(s.kept, s.token_ids) for s in segments])
            except ValueError as error:
                raise InvalidRequestError(f"sequence {item.sequence_id}: {error}") from None
        if any(s.temperature is not None for s in segments):
            of_segment = [math.nan if s.temperature is None else s.temperature for s in segments]
            temperatures = np.repeat(of_segment, [s.num_tokens for s in segments])
        of_policy = [s for s in segments if s.is_policy]
        teacher = None
        if of_policy and all(len(s.teacher_logprobs) for s in of_policy):
            teacher = np.concatenate(
                [s.teacher_logprobs if s.is_policy else np.zeros(s.num_tokens, dtype=np.float32) for s in segments]
            )
        return cls(
            token_ids=item.sequence.token_ids,
            loss_mask=loss_mask,
            behaviour=behaviour,
            weight_versions=weight_versions,
            mixed_cache=mixed_cache,
            advantage=advantage,
            kept=kept,
            temperatures=temperatures,
            teacher=teacher,
        )


def _check_first_token(loss_mask: Bools, name: str) -> None:
    # The log-probability of a token comes from the position before it.
    if len(loss_mask) and loss_mask[0]:
        raise InvalidRequestError(f"{name} trains its first token, which no token precedes; it needs a prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass, on the device: a row of tokens, and the trained tokens that the row predicts, document by
    document."""

    token_ids: torch.Tensor  # [num_tokens] of the forward pass
    position_ids: torch.Tensor  # [num_tokens], from 0 in every document
    documents: Documents  # how the row is made up
    targets: Targets
    behaviour: torch.Tensor  # [num_targets]
    advantages: torch.Tensor  # [num_targets]
    weight_versions: torch.Tensor  # [num_targets]
    mixed_cache: torch.Tensor  # [num_targets] bool
    sequence_index: torch.Tensor  # [num_targets] in [0, num_sequences)
    num_sequences: int
    num_given_tokens: int  # of the sequences, tokens that several begin with counted for each
    sources: Seq[int] = ()  # [num_sequences], index of the document in the list that was packed
    is_dummy: bool = False  # only takes part in collectives
    drawn: Drawn | None = None  # None: every target from the whole vocabulary, at the recipe's temperature
    old_values: torch.Tensor | None = None  # [num_targets] of the value head at step start
    returns: torch.Tensor | None = None  # [num_targets] that the value head is fitted to
    teacher: torch.Tensor | None = None  # [num_targets] log-probabilities of the model that is distilled


@dataclass(frozen=True, slots=True)
class Member:
    """A document, and the number of its first tokens that the previous document of the family has too."""

    index: int
    length: int
    shared: int  # 0 for the first of a family


Family = tuple[Member, ...]


def pack(
    documents: Seq[Document], max_tokens: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[MicroBatch]:
    """Pack all documents into micro-batches of at most ``max_tokens`` computed tokens, by first-fit decreasing.

    Documents without a trained token need no computation and appear in no micro-batch. ``dtype`` is of log-probabilities and
    of all values compared with them.
    """
    computed = [d.computed for d in documents]
    found = families(computed, max_tokens)
    sizes = np.array([sum(m.length - m.shared for m in family) for family in found], dtype=np.int64)
    return [
        _micro_batch(documents, computed, [found[i] for i in chosen], device, dtype)
        for chosen in first_fit_decreasing(sizes, max_tokens)
    ]


def families(token_ids: Seq[npt.NDArray[np.int32]], max_tokens: int) -> list[Family]:
    """Group documents with a common beginning into families of at most ``max_tokens`` distinct tokens, or one document.

    Documents without tokens are in no family. Families come in the order of their smallest index.

    >>> a, b, c = np.array([1, 2, 3]), np.array([7, 8]), np.array([1, 2, 4, 5])
    >>> [[(m.index, m.shared) for m in family] for family in families([a, b, c], 10)]
    [[(0, 0), (2, 2)], [(1, 0)]]
    >>> [[(m.index, m.shared) for m in family] for family in families([a, b, c], 4)]
    [[(0, 0)], [(1, 0)], [(2, 0)]]
    """
    # Big-endian, so that bytes sort like the ids; a document comes before its continuations.
    keys = [np.ascontiguousarray(ids, dtype=">u4").tobytes() for ids in token_ids]
    found: list[list[Member]] = []
    num_tokens = 0  # distinct ones of the newest family
    previous = b""
    for index in sorted((i for i, key in enumerate(keys) if key), key=keys.__getitem__):
        length = len(keys[index]) // 4
        common = min(len(previous) // 4, length)
        ours, theirs = (np.frombuffer(key, dtype=np.uint32, count=common) for key in (keys[index], previous))
        differing = np.flatnonzero(ours != theirs)
        shared = int(differing[0]) if len(differing) else common
        previous = keys[index]
        if shared < WORTHWHILE * length or num_tokens + length - shared > max_tokens:
            shared = num_tokens = 0
            found.append([])
        num_tokens += length - shared
        found[-1].append(Member(index, length, shared))
    return sorted((tuple(family) for family in found), key=lambda family: min(m.index for m in family))


def first_fit_decreasing(lengths: Ints, max_tokens: int) -> list[list[int]]:
    """Indices of the non-empty items by bin. O(items * bins) in numpy: 10,000 items take less than a second."""
    if max_tokens < 1:
        raise InvalidRequestError(f"max_tokens per micro-batch must be at least 1, got {max_tokens}")
    order = np.argsort(-lengths, kind="stable")
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)  # [bins], the tail unused
    for index in order.tolist():
        length = int(lengths[index])
        if length == 0:
            continue
        fits = np.flatnonzero(room[: len(bins)] >= length)
        if len(fits):
            target = int(fits[0])
        else:
            target = len(bins)
            bins.append([])
            room[target] = max(max_tokens, length)
        bins[target].append(index)
        room[target] -= length
    return bins


def _micro_batch(
    given: Seq[Document], computed: Seq[TokenIds], placed: Seq[Family], device: torch.device | str, dtype: torch.dtype
) -> MicroBatch:
    branches: list[Branch] = []
    paths: dict[int, Ints] = {}  # of each document: the rows of its tokens, in order
    end = 0
    # Families of one document first, longest first; the other families keep their order.
    for family in sorted(placed, key=lambda family: len(family) > 1):
        path = np.zeros(0, dtype=np.int64)
        for member in family:
            path = path[: member.shared]
            if member.length > member.shared:
                branches.append(Branch(end, member.length - member.shared, path))
                path, end = branches[-1].rows, branches[-1].end
            paths[member.index] = path
    sources = list(paths)
    documents = [given[i] for i in sources]
    token_ids, position_ids = (np.empty(end, dtype=np.int64) for _ in range(2))
    for source, path in paths.items():
        token_ids[path] = computed[source]
        position_ids[path] = np.arange(len(path))
    masks = [d.loss_mask for d in documents]
    mask = np.concatenate(masks)
    num_trained = np.array([int(m.sum()) for m in masks], dtype=np.int64)
    kept = _joined(documents, "kept", KeptSets.whole)
    temperatures = _joined(documents, "temperatures", lambda n: np.full(n, np.nan))
    teacher = _joined(documents, "teacher", lambda n: np.zeros(n, dtype=np.float32))
    floats: Any = partial(torch.as_tensor, dtype=dtype, device=device)
    on_device: Any = partial(torch.as_tensor, device=device)
    cut = None if kept is None else KeptBlocks.on(KeptSets.concatenated(kept).select(mask), torch.device(device))
    own_temperatures = None if temperatures is None else floats(np.concatenate(temperatures)[mask])
    drawn = None if cut is None and own_temperatures is None else Drawn(kept=cut, temperatures=own_temperatures)
    # A path ends before the last trained token: mask[1:] is true for the rows that predict a trained token.
    predecessors = np.concatenate([paths[i][m[1 : len(paths[i]) + 1]] for i, m in zip(sources, masks, strict=True)])
    target_ids = np.concatenate([d.token_ids for d in documents])[mask].astype(np.int64)
    return MicroBatch(
        token_ids=on_device(token_ids),
        position_ids=on_device(position_ids),
        documents=Documents(branches, device),
        targets=Targets.of(predecessors, target_ids, device, distinct=drawn is None),
        behaviour=floats(np.concatenate([d.behaviour for d in documents])[mask]),
        advantages=floats(np.repeat(np.array([d.advantage for d in documents], dtype=np.float64), num_trained)),
        weight_versions=on_device(np.concatenate([d.weight_versions for d in documents])[mask]),
        mixed_cache=on_device(np.concatenate([d.mixed_cache for d in documents])[mask]),
        sequence_index=on_device(np.repeat(np.arange(len(documents), dtype=np.int64), num_trained)),
        num_sequences=len(documents),
        num_given_tokens=sum(len(d.token_ids) for d in documents),
        sources=sources,
        drawn=drawn,
        teacher=None if teacher is None else floats(np.concatenate(teacher)[mask]),
    )


def _joined(documents: Seq[Document], name: str, absent: Callable[[int], Any]) -> list[Any] | None:
    """A field of all documents, ``absent(num_tokens)`` where one has none; None when no document has it."""
    values = [getattr(d, name) for d in documents]
    if all(value is None for value in values):
        return None
    return [absent(len(d.token_ids)) if value is None else value for d, value in zip(documents, values, strict=True)]


def dummy_micro_batch(device: torch.device | str, dtype: torch.dtype) -> MicroBatch:
    """One token, none trained: lets a rank without work take part in the collectives of a forward and backward pass."""
    nothing = Document.supervised(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.bool_))
    made = _micro_batch([nothing], [nothing.token_ids[:1]], [(Member(0, 1, 0),)], device, dtype)
    return replace(made, is_dummy=True, num_given_tokens=0)


def logprob_dtype(model: torch.nn.Module) -> torch.dtype:
    """The type of log-probabilities and of all values compared with them: float64 for float64 models, else float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


def check_batch(batch: RankBatch, ranks: Ranks, vocab_size: int) -> None:
    """Check this rank's share. A collective: every rank calls this function, and all raise when one does.

    Raises:
        InvalidRequestError: the model cannot read a sequence, or the denominators are not the sums of the shares, which
            would silently scale the gradient. The metadata names the first such ``sequence_id``.
    """
    faults: list[tuple[str, str]] = []
    counted = [[0, 0] for _ in batch.minibatches]
    for item in batch.sequences:
        token_ids = item.sequence.token_ids
        unknown = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if not 0 <= item.minibatch < len(batch.minibatches):
            fault = f"its minibatch is {item.minibatch}, but the batch has {len(batch.minibatches)}"
            faults.append((item.sequence_id, fault))
            continue
        if len(unknown):
            fault = (
                f"it has the token id {unknown[0]}, and the model of {batch.policy} has ids 0 to {vocab_size - 1}: a replica "
                "has another model or tokenizer"
            )
            faults.append((item.sequence_id, fault))
        counted[item.minibatch][0] += 1
        counted[item.minibatch][1] += item.sequence.num_trained_tokens
    counted.append([len(faults), 0])
    *found, (num_faults, _) = ranks.sum(torch.tensor(counted, dtype=torch.int64, device=ranks.device)).tolist()
    if faults:
        sequence_id, fault = faults[0]
        raise InvalidRequestError(
            f"sequence {sequence_id} of batch {batch.training_step} of policy {batch.policy} cannot be trained: {fault} "
            f"({len(faults)} such sequences on this rank). `rollmill journal RUN` shows its record",
            sequence_id=sequence_id,
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    if num_faults:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: other ranks hold {num_faults} sequences that cannot be "
            "trained; their logs name them",
            policy=batch.policy,
            training_step=str(batch.training_step),
        )
    stated = [[t.num_sequences, t.num_trained_tokens] for t in batch.minibatches]
    if found != stated:
        raise InvalidRequestError(
            f"batch {batch.training_step} of policy {batch.policy}: headers state (sequences, trained tokens) "
            f"{stated} per minibatch, the ranks hold {found}"
        )


def pack_for_ranks(
    minibatches: Seq[Seq[Document]], max_tokens: int, ranks: Ranks, dtype: torch.dtype
) -> list[list[MicroBatch]]:
    """Pack each minibatch. Ranks with fewer micro-batches get dummies, so that all ranks join each forward pass."""
    packed = [pack(documents, max_tokens, ranks.device, dtype) for documents in minibatches]
    counts = ranks.max(*map(len, packed))
    for micro_batches, count in zip(packed, counts, strict=True):
        micro_batches.extend(dummy_micro_batch(ranks.device, dtype) for _ in range(count - len(micro_batches)))
    return packed


def forward(
    model: Callable[..., tuple[torch.Tensor, ...]], batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log-probabilities, entropies, values) of the trained tokens; None without a value head. [num_targets] each"""
    logprobs, entropy, *values = model(
        batch.token_ids, batch.position_ids, batch.documents, batch.targets, temperature, batch.drawn
    )
    return logprobs, entropy, values[0] if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchContext:
    """Statistics of one minibatch, the same on every rank but for ``masks`` and ``counted``: those of this rank's micro-batches."""

    totals: MinibatchTotals  # the denominators
    masks: Seq[torch.Tensor]  # the tokens that the loss sees, one [num_targets] bool per micro-batch
    counted: Seq[torch.Tensor]  # those that count in a sequence's length
    num_kept: int  # tokens that the loss sees, over all ranks
    region: TrustRegion | None = None
    mean_weight: torch.Tensor | None = None  # []

    def tokens(
        self, index: int, batch: MicroBatch, logprobs: torch.Tensor, proximal: torch.Tensor | None
    ) -> TokenBatch:
        """The loss's input for the micro-batch ``index``."""
        return TokenBatch(
            logprobs=logprobs,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            mask=self.masks[index],
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            proximal=proximal,
            trust_region=self.region,
            mean_weight=self.mean_weight,
        )


def minibatch_context(
    algorithm: Algorithm,
    config: AlgorithmConfig,
    micro_batches: Seq[MicroBatch],
    totals: MinibatchTotals,
    ranks: Ranks,
    *,
    current: Seq[torch.Tensor] | None,
    proximal: Seq[torch.Tensor] | None,
) -> MinibatchContext:
    """Compute the context, by collectives if the settings ask for them.

    ``current`` and ``proximal``, one [num_targets] per micro-batch, are present if the algorithm needs them.
    """
    everything = [torch.ones_like(m.sequence_index, dtype=torch.bool) for m in micro_batches]
    masks: Seq[torch.Tensor] = everything
    counted, num_kept = everything, totals.num_trained_tokens
    if config.rejection:
        assert proximal is not None
        masks = [
            kept_by(config.rejection, p, m.behaviour, mask, m.sequence_index, m.num_sequences)
            for m, p, mask in zip(micro_batches, proximal, masks, strict=True)
        ]
    if isinstance(config, M2poMask):
        assert proximal is not None
        gaps = [(m.behaviour - p).square() for m, p in zip(micro_batches, proximal, strict=True)]
        whole = ranks.gather(torch.cat([gap[mask] for gap, mask in zip(gaps, masks, strict=True)]))
        limit = largest_kept(whole, config.m2po_threshold)
        masks = [mask if limit is None else mask & (gap <= limit) for gap, mask in zip(gaps, masks, strict=True)]
    if masks is not everything:
        num_kept, num_sequences = _kept(micro_batches, masks, ranks)
        if isinstance(config, M2poMask) or config.rejection_denominator == "kept":
            counted = list(masks)
            totals = replace(totals, num_trained_tokens=num_kept)
        if config.rejection and config.rejection_denominator == "kept":
            totals = replace(totals, num_sequences=num_sequences)
    context = MinibatchContext(totals=totals, masks=masks, counted=counted, num_kept=num_kept)
    if algorithm.needs_trust_region:
        assert current is not None and isinstance(config, M2po)
        moments = [
            binding_second_moments(clamped(logprobs - m.behaviour), m.advantages, mask)
            for m, logprobs, mask in zip(micro_batches, current, masks, strict=True)
        ]
        context = replace(context, region=trust_region(ranks.gather(torch.cat(moments)), config))
    if isinstance(config, Tis) and config.importance_normalize:
        assert proximal is not None
        context = replace(context, mean_weight=_mean_weight(context, config, micro_batches, proximal, ranks))
    return context


def _kept(micro_batches: Seq[MicroBatch], masks: Seq[torch.Tensor], ranks: Ranks) -> tuple[int, int]:
    """Numbers of kept tokens, and of sequences with at least one kept token, over all ranks."""
    found = torch.zeros(2, dtype=torch.int64, device=ranks.device)
    for m, mask in zip(micro_batches, masks, strict=True):
        lengths = sequence_lengths(mask, m.sequence_index, m.num_sequences)
        found += torch.stack([lengths.sum(), (lengths > 0).sum()])
    tokens, sequences = ranks.sum(found).tolist()
    return int(tokens), int(sequences)


def _mean_weight(
    context: MinibatchContext, config: Tis, micro_batches: Seq[MicroBatch], proximal: Seq[torch.Tensor], ranks: Ranks
) -> torch.Tensor:
    """Mean of the truncated weights over tokens, or over sequences for weights of sequences. []"""
    level = config.importance_level
    found = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for index, (m, p) in enumerate(zip(micro_batches, proximal, strict=True)):
        tokens = context.tokens(index, m, p, p)
        weights = truncated(importance_weights(p, m.behaviour, tokens, level), config)
        found += weight_sum(weights, tokens, level)
    total, count = ranks.sum(found).unbind()
    return (total / count.clamp(min=1.0)).to(proximal[0].dtype)
