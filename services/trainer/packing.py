"""Pack documents into micro-batches under a token budget: flat arrays without padding.

First-fit decreasing, deterministic for any budget. A document longer than the budget gets a micro-batch of its own;
none is dropped, cut or doubled. Within a micro-batch documents stand longest first, ties in the order given, so
documents of equal length are neighbours and attention can take them in one call.

Plain numpy: it knows nothing about models, ranks or losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequestError
from services.common.kept_tokens import KeptSets, unpack
from services.common.types import Logprobs, Segment, TokenIds, TrainingSequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_VERSION = -1
DUMMY_SOURCE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One sequence as the trainer sees it: its tokens, and which of them are trained."""

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

    @classmethod
    def supervised(cls, token_ids: TokenIds, loss_mask: Bools, name: str = "document") -> Document:
        """A demonstration: every masked token is a target, whoever wrote it."""
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
        """Concatenate the segments; exactly the sampled token ids, nothing is re-tokenised."""
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
            kept = KeptSets.concatenated([_kept_of(s, item.sequence_id) for s in segments])
        if any(s.temperature is not None for s in segments):
            of_segment = [math.nan if s.temperature is None else s.temperature for s in segments]
            temperatures = np.repeat(of_segment, [s.num_tokens for s in segments])
        return cls(
            token_ids=item.sequence.token_ids,
            loss_mask=loss_mask,
            behaviour=behaviour,
            weight_versions=weight_versions,
            mixed_cache=mixed_cache,
            advantage=advantage,
            kept=kept,
            temperatures=temperatures,
            teacher=_teacher_of(segments, item.sequence_id),
        )


def _kept_of(segment: Segment, sequence_id: str) -> KeptSets:
    try:
        return unpack(segment.kept, segment.token_ids)
    except ValueError as error:
        raise InvalidRequestError(f"sequence {sequence_id}: {error}") from None


def _teacher_of(segments: Seq[Segment], sequence_id: str) -> Logprobs | None:
    policy = [s for s in segments if s.is_policy]
    if not any(len(s.teacher_logprobs) for s in policy):
        return None
    if lacking := [s for s in policy if not len(s.teacher_logprobs)]:
        raise InvalidRequestError(
            f"sequence {sequence_id}: {len(lacking)} of {len(policy)} policy segments lack the teacher's log-probabilities"
        )
    own = [s.teacher_logprobs if s.is_policy else np.zeros(s.num_tokens, dtype=np.float32) for s in segments]
    return np.concatenate(own)


def _check_first_token(loss_mask: Bools, name: str) -> None:
    # The log-probability of a token comes from the position before it.
    if len(loss_mask) and loss_mask[0]:
        raise InvalidRequestError(f"{name} trains its first token, which no token precedes; it needs a prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass eats: documents laid end to end."""

    token_ids: Ints  # [num_tokens]
    position_ids: Ints  # [num_tokens], from 0 in every document
    offsets: Ints  # [num_documents + 1]: document i is offsets[i]:offsets[i + 1]
    loss_mask: Bools  # [num_tokens]
    behaviour: Logprobs  # [num_tokens]
    advantages: npt.NDArray[np.float64]  # [num_tokens], its document's advantage
    weight_versions: Ints  # [num_tokens]
    mixed_cache: Bools  # [num_tokens]
    document_index: Ints  # [num_tokens], position of the document in this micro-batch
    sources: Ints  # [num_documents], index of the document in the list that was packed, or DUMMY_SOURCE
    kept: KeptSets | None = None  # of all tokens, as of a document
    temperatures: npt.NDArray[np.float64] | None = None  # [num_tokens], as of a document
    teacher: Logprobs | None = None  # [num_tokens], as of a document

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_documents(self) -> int:
        return len(self.sources)

    @property
    def is_dummy(self) -> bool:
        """Whether it only takes part in collectives."""
        return bool(self.sources[0] == DUMMY_SOURCE)

    @property
    def target_positions(self) -> Ints:
        """Positions of the trained tokens. [num_trained_tokens]"""
        return np.flatnonzero(self.loss_mask).astype(np.int64)


def pack(documents: Seq[Document], max_tokens: int) -> list[MicroBatch]:
    """All documents, in as few micro-batches of at most ``max_tokens`` tokens as first-fit decreasing finds.

    Empty documents hold nothing to compute and appear in no micro-batch.
    """
    lengths = np.array([d.num_tokens for d in documents], dtype=np.int64)
    return [_lay_out([documents[i] for i in chosen], chosen) for chosen in first_fit_decreasing(lengths, max_tokens)]


def first_fit_decreasing(lengths: Ints, max_tokens: int) -> list[list[int]]:
    """Indices of the non-empty documents by bin. O(documents * bins) in numpy: 10,000 in well under a second."""
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


def dummy_micro_batch() -> MicroBatch:
    """One token, none trained: lets a rank without work take part in the collectives of a forward and backward pass."""
    empty = Document.supervised(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))
    return _lay_out([empty], [DUMMY_SOURCE])


def _lay_out(documents: Seq[Document], sources: Seq[int]) -> MicroBatch:
    lengths = np.array([d.num_tokens for d in documents], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return MicroBatch(
        token_ids=np.concatenate([d.token_ids for d in documents]).astype(np.int64),
        position_ids=np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths),
        offsets=offsets,
        loss_mask=np.concatenate([d.loss_mask for d in documents]),
        behaviour=np.concatenate([d.behaviour for d in documents]),
        advantages=np.repeat(np.array([d.advantage for d in documents], dtype=np.float64), lengths),
        weight_versions=np.concatenate([d.weight_versions for d in documents]),
        mixed_cache=np.concatenate([d.mixed_cache for d in documents]),
        document_index=np.repeat(np.arange(len(documents), dtype=np.int64), lengths),
        sources=np.array(sources, dtype=np.int64),
        kept=_joined_kept(documents),
        temperatures=_joined_temperatures(documents),
        teacher=_joined_teacher(documents),
    )


def _joined_kept(documents: Seq[Document]) -> KeptSets | None:
    if all(d.kept is None for d in documents):
        return None
    return KeptSets.concatenated([KeptSets.whole(d.num_tokens) if d.kept is None else d.kept for d in documents])


def _joined_temperatures(documents: Seq[Document]) -> npt.NDArray[np.float64] | None:
    if all(d.temperatures is None for d in documents):
        return None
    return np.concatenate(
        [np.full(d.num_tokens, np.nan) if d.temperatures is None else d.temperatures for d in documents]
    )


def _joined_teacher(documents: Seq[Document]) -> Logprobs | None:
    """Of a dummy, nobody was asked; of what is taught, everything was."""
    if all(d.teacher is None for d in documents):
        return None
    if any(d.teacher is None and d.num_trained_tokens for d in documents):
        raise InvalidRequestError("a batch has sequences with and without a teacher's log-probabilities")
    own = [np.zeros(d.num_tokens, dtype=np.float32) if d.teacher is None else d.teacher for d in documents]
    return np.concatenate(own)
