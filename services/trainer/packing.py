"""Packs documents into micro-batches under a token budget: flat arrays without padding.

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

Plain numpy, independent of models, ranks and losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequestError
from services.common.kept_tokens import KeptSets, unpack
from services.common.records import Logprobs, Segment, TokenIds, TrainingSequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_VERSION = -1
DUMMY_SOURCE = -1
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
            teacher=_teacher_of(segments),
        )


def _kept_of(segment: Segment, sequence_id: str) -> KeptSets:
    try:
        return unpack(segment.kept, segment.token_ids)
    except ValueError as error:
        raise InvalidRequestError(f"sequence {sequence_id}: {error}") from None


def _teacher_of(segments: Seq[Segment]) -> Logprobs | None:
    """The teacher's log-probabilities; None where a policy segment lacks them."""
    scored = [len(s.teacher_logprobs) > 0 for s in segments if s.is_policy]
    if not scored or not all(scored):
        return None
    own = [s.teacher_logprobs if s.is_policy else np.zeros(s.num_tokens, dtype=np.float32) for s in segments]
    return np.concatenate(own)


def _check_first_token(loss_mask: Bools, name: str) -> None:
    # The log-probability of a token comes from the position before it.
    if len(loss_mask) and loss_mask[0]:
        raise InvalidRequestError(f"{name} trains its first token, which no token precedes; it needs a prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass: a row of tokens, and the trained tokens that the row predicts, document by document."""

    token_ids: Ints  # [num_tokens]
    position_ids: Ints  # [num_tokens], from 0 in every document
    branches: tuple[Branch, ...]  # how the row is made up
    predecessors: Ints  # [num_targets], the row's token whose hidden state predicts the target
    target_ids: Ints  # [num_targets]
    behaviour: Logprobs  # [num_targets]
    advantages: npt.NDArray[np.float64]  # [num_targets], its document's advantage
    weight_versions: Ints  # [num_targets]
    mixed_cache: Bools  # [num_targets]
    document_index: Ints  # [num_targets], position of the document in this micro-batch
    sources: Ints  # [num_documents], index of the document in the list that was packed, or DUMMY_SOURCE
    num_given_tokens: int  # of the documents as they were given, shared tokens counted for each
    kept: KeptSets | None = None  # of the targets, as of a document
    temperatures: npt.NDArray[np.float64] | None = None  # [num_targets], as of a document
    teacher: Logprobs | None = None  # [num_targets], as of a document

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the forward pass."""
        return len(self.token_ids)

    @property
    def num_documents(self) -> int:
        return len(self.sources)

    @property
    def is_dummy(self) -> bool:
        """Whether this micro-batch only takes part in collectives."""
        return bool(self.sources[0] == DUMMY_SOURCE)


def pack(documents: Seq[Document], max_tokens: int) -> list[MicroBatch]:
    """Pack all documents into micro-batches of at most ``max_tokens`` computed tokens, by first-fit decreasing.

    Documents without a trained token need no computation and appear in no micro-batch.
    """
    computed = [d.computed for d in documents]
    found = families(computed, max_tokens)
    sizes = np.array([num_distinct(family) for family in found], dtype=np.int64)
    return [
        _micro_batch(documents, computed, [found[i] for i in chosen])
        for chosen in first_fit_decreasing(sizes, max_tokens)
    ]


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


def dummy_micro_batch() -> MicroBatch:
    """One token, none trained: lets a rank without work take part in the collectives of a forward and backward pass."""
    nothing = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        token_ids=np.zeros(1, dtype=np.int64),
        position_ids=np.zeros(1, dtype=np.int64),
        branches=(Branch(0, 1, nothing),),
        predecessors=nothing,
        target_ids=nothing,
        behaviour=np.zeros(0, dtype=np.float32),
        advantages=np.zeros(0, dtype=np.float64),
        weight_versions=nothing,
        mixed_cache=np.zeros(0, dtype=np.bool_),
        document_index=nothing,
        sources=np.array([DUMMY_SOURCE], dtype=np.int64),
        num_given_tokens=0,
    )


def _micro_batch(given: Seq[Document], computed: Seq[TokenIds], placed: Seq[Family]) -> MicroBatch:
    # Families of one document first, longest first; the other families keep their order.
    branches, paths = lay_out(sorted(placed, key=lambda family: len(family) > 1))
    sources = list(paths)
    documents = [given[i] for i in sources]
    num_tokens = branches[-1].end
    token_ids, position_ids = (np.empty(num_tokens, dtype=np.int64) for _ in range(2))
    for source, path in paths.items():
        token_ids[path] = computed[source]
        position_ids[path] = np.arange(len(path))
    masks = [d.loss_mask for d in documents]
    mask = np.concatenate(masks)
    num_trained = np.array([int(m.sum()) for m in masks], dtype=np.int64)
    kept = _joined(documents, "kept", KeptSets.whole)
    temperatures = _joined(documents, "temperatures", lambda n: np.full(n, np.nan))
    teacher = _joined(documents, "teacher", lambda n: np.zeros(n, dtype=np.float32))
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        branches=tuple(branches),
        # A path ends before the last trained token: mask[1:] is true for the rows that predict a trained token.
        predecessors=np.concatenate([paths[i][m[1 : len(paths[i]) + 1]] for i, m in zip(sources, masks, strict=True)]),
        target_ids=np.concatenate([d.token_ids for d in documents])[mask].astype(np.int64),
        behaviour=np.concatenate([d.behaviour for d in documents])[mask],
        advantages=np.repeat(np.array([d.advantage for d in documents], dtype=np.float64), num_trained),
        weight_versions=np.concatenate([d.weight_versions for d in documents])[mask],
        mixed_cache=np.concatenate([d.mixed_cache for d in documents])[mask],
        document_index=np.repeat(np.arange(len(documents), dtype=np.int64), num_trained),
        sources=np.array(sources, dtype=np.int64),
        num_given_tokens=sum(d.num_tokens for d in documents),
        kept=None if kept is None else KeptSets.concatenated(kept).select(mask),
        temperatures=None if temperatures is None else np.concatenate(temperatures)[mask],
        teacher=None if teacher is None else np.concatenate(teacher)[mask],
    )


def _joined(documents: Seq[Document], name: str, absent: Callable[[int], Any]) -> list[Any] | None:
    """A field of all documents, ``absent(num_tokens)`` where one has none; None when no document has it, as in a dummy."""
    values = [getattr(d, name) for d in documents]
    if all(value is None for value in values):
        return None
    return [absent(d.num_tokens) if value is None else value for d, value in zip(documents, values, strict=True)]


@dataclass(frozen=True, slots=True)
class Member:
    """A document, and the number of its first tokens that the previous document of the family has too."""

    index: int
    length: int
    shared: int  # 0 for the first of a family

    @property
    def own(self) -> int:
        return self.length - self.shared


Family = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive rows of one document, and the earlier rows of the same document."""

    start: int
    length: int
    prefix: Ints  # [positions before the branch] rows, ascending

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> Ints:
        """All rows that the last one sees, itself included. [prefix + length]"""
        return np.concatenate([self.prefix, np.arange(self.start, self.end, dtype=np.int64)])


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
        shared = _num_shared(previous, keys[index])
        previous = keys[index]
        if shared < WORTHWHILE * length or num_tokens + length - shared > max_tokens:
            shared = num_tokens = 0
            found.append([])
        num_tokens += length - shared
        found[-1].append(Member(index, length, shared))
    return sorted((tuple(family) for family in found), key=lambda family: min(m.index for m in family))


def num_distinct(family: Family) -> int:
    """Number of rows of the family."""
    return sum(member.own for member in family)


def lay_out(placed: Seq[Family]) -> tuple[list[Branch], dict[int, Ints]]:
    """The branches of the families one after another, and for each document the rows of its tokens, in order."""
    branches: list[Branch] = []
    paths: dict[int, Ints] = {}
    end = 0
    for family in placed:
        path = np.zeros(0, dtype=np.int64)
        for member in family:
            path = path[: member.shared]
            if member.own:
                branches.append(Branch(end, member.own, path))
                path, end = branches[-1].rows, branches[-1].end
            paths[member.index] = path
    return branches, paths


def _num_shared(first: bytes, second: bytes) -> int:
    """Length of the common beginning of two documents, in tokens."""
    length = min(len(first), len(second)) // 4
    differ = np.frombuffer(first, dtype=np.uint32, count=length) != np.frombuffer(second, dtype=np.uint32, count=length)
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
