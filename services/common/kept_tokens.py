"""The set of tokens that a sampler could draw, for each sampled token, packed into bytes.

Top-k, top-p, min-p and ``min_new_tokens`` cut the distribution that a token is drawn from. An engine records the
remaining ids (``kept_rows``, ``left_out_row``), a segment carries them packed (``pack``), and the trainer takes its
log-probabilities over the same sets (``unpack``). No bytes at all: every token was drawn from the whole vocabulary.

    words     (uint32) number of tokens, of rows; for each row: number of its ids << 1 | whether they are left out; for each row the gaps
              between its ascending ids
    packed    zstd of the words, all their lowest bytes first, then all second ones, and so on

A row is of one token; the tokens behind the last row were drawn from the whole vocabulary. A sampled token belongs to its set
and is not written: a single token that could be drawn is a row without ids.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from services.common import errors

Ints = npt.NDArray[np.int64]
FREE_IDS = 1024  # of a token: as many are unpacked from however few bytes
MOST_BYTES_PER_BYTE = 256  # beyond them, of the unpacked words
_WORD = np.dtype("<u4")
_LEVEL = 3
_BEHIND = np.iinfo(np.int64).max  # sorts behind every id
_LARGEST_ID = np.iinfo(np.int32).max


class KeptRow(NamedTuple):
    """The set of one sampled token."""

    left_out: bool  # the ids are those that could not be drawn, instead of those that could
    ids: npt.NDArray[np.int32]  # ascending


WHOLE = KeptRow(True, np.zeros(0, dtype=np.int32))  # the whole vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The sets of consecutive tokens as pairs (token, id), ordered by token."""

    left_out: npt.NDArray[
        np.bool_
    ]  # [num_tokens]: its ids are those that could not be drawn, instead of those that could
    rows: Ints  # [num_pairs], the token of each pair
    ids: Ints  # [num_pairs]

    @property
    def num_tokens(self) -> int:
        return len(self.left_out)

    @classmethod
    def whole(cls, num_tokens: int) -> KeptSets:
        """Tokens that were drawn from the whole vocabulary."""
        none = np.zeros(0, dtype=np.int64)
        return cls(np.ones(num_tokens, dtype=np.bool_), none, none)

    @classmethod
    def concatenated(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """The sets of all parts, one after another; there is at least one."""
        starts = np.cumsum([0, *(part.num_tokens for part in parts[:-1])])
        return cls(
            np.concatenate([part.left_out for part in parts]),
            np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=True)]),
            np.concatenate([part.ids for part in parts]),
        )

    def select(self, chosen: npt.NDArray[np.bool_]) -> KeptSets:
        """The sets of the tokens where ``chosen`` [num_tokens] is true."""
        pairs = chosen[self.rows]
        place = np.cumsum(chosen) - 1
        return KeptSets(self.left_out[chosen], place[self.rows[pairs]], self.ids[pairs])


def kept_rows(ids: Ints, counts: Ints, sampled: Ints, vocab_size: int | None = None) -> list[KeptRow]:
    """Rows for the first ``counts`` [n] of ``ids`` [n, width], in any order, and the tokens ``sampled`` [n].

    A sampled token that is not among the ids belongs to the set all the same. With ``vocab_size`` a set of more than half of
    the vocabulary is written as the missing tokens.
    """
    others = np.arange(ids.shape[1]) < counts[:, None]
    others &= ids != sampled[:, None]
    numbers = others.sum(axis=1)
    ordered = np.sort(np.where(others, ids, _BEHIND), axis=1)
    rows = []
    for kept, number, token in zip(ordered, numbers.tolist(), sampled.tolist(), strict=True):
        if vocab_size is not None and 2 * number > vocab_size:
            missing = np.ones(vocab_size, dtype=np.bool_)
            missing[kept[:number]] = missing[token] = False
            rows.append(KeptRow(True, np.flatnonzero(missing).astype(np.int32)))
        else:
            rows.append(KeptRow(False, kept[:number].astype(np.int32)))
    return rows


def left_out_row(ids: Sequence[int]) -> KeptRow:
    """The row of a token that was drawn from the vocabulary without these ids."""
    return KeptRow(True, np.unique(np.asarray(ids, dtype=np.int32)))


def pack(rows: Sequence[KeptRow], num_tokens: int) -> bytes:
    """The bytes of ``num_tokens`` tokens: of ``rows``, and of the whole vocabulary for those behind them.

    Without a row there are no bytes.
    """
    if len(rows) > num_tokens:
        raise ValueError(f"{len(rows)} rows for {num_tokens} tokens")
    if not rows:
        return b""
    counts = np.array([len(row.ids) for row in rows], dtype=np.int64)
    flat = np.concatenate([row.ids for row in rows]).astype(np.int64)
    gaps = np.diff(flat, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = flat[first]
    numbers = counts << 1 | np.array([row.left_out for row in rows])
    words = np.concatenate([[num_tokens, len(rows)], numbers, gaps]).astype(_WORD)
    return zstandard.compress(words.view(np.uint8).reshape(-1, _WORD.itemsize).T.tobytes(), _LEVEL)


def unpack(packed: bytes, token_ids: npt.NDArray[np.int32]) -> KeptSets:
    """The sets of the tokens ``token_ids``. ``ValueError``: the bytes are not those of a sampler that drew these tokens."""
    if not packed:
        return KeptSets.whole(len(token_ids))
    written, counts, flat = _read(packed, token_ids)
    left_out = np.ones(len(token_ids), dtype=np.bool_)
    left_out[: len(written)] = written
    own = np.flatnonzero(~left_out)  # whose sampled token is not written
    rows = np.concatenate([np.repeat(np.arange(len(counts)), counts), own])
    ids = np.concatenate([flat, token_ids[own]])
    order = np.argsort(rows, kind="stable")
    return KeptSets(left_out, rows[order], ids[order])


def check(packed: bytes, token_ids: npt.NDArray[np.int32], vocab_size: int | None = None) -> None:
    """Check that ``unpack`` takes the bytes, and that every id is below ``vocab_size`` if given. Raises ``ValueError`` with
    the defect."""
    if packed:
        largest = int(_read(packed, token_ids)[2].max(initial=-1))
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(f"kept tokens have the id {largest}, and the policy has ids 0 to {vocab_size - 1}")


def head(packed: bytes, token_ids: npt.NDArray[np.int32], num_tokens: int) -> bytes:
    """The bytes of the first ``num_tokens`` of these tokens."""
    if not packed:
        return packed
    left_out, counts, flat = _read(packed, token_ids)
    parts = np.split(flat.astype(np.int32), np.cumsum(counts)[:-1])
    rows = [KeptRow(*row) for row in zip(left_out.tolist(), parts, strict=True)]
    return pack(rows[:num_tokens], num_tokens)


def _read(packed: bytes, token_ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.bool_], Ints, Ints]:
    """Of each row whether its ids are left out and their number, and all ids."""
    bound = _WORD.itemsize * (2 + (1 + FREE_IDS) * len(token_ids)) + MOST_BYTES_PER_BYTE * len(packed)
    try:
        size = zstandard.get_frame_parameters(packed).content_size
        if size > bound:
            raise ValueError(
                f"kept tokens of {len(packed)} bytes state {size} bytes unpacked; at most {bound} are taken"
            )
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=bound, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"kept tokens of {len(packed)} bytes cannot be unpacked: {error}") from None
    if len(raw) < 2 * _WORD.itemsize or len(raw) % _WORD.itemsize:
        raise ValueError(f"kept tokens of {len(raw)} bytes unpacked are cut off")
    words = np.frombuffer(raw, np.uint8).reshape(_WORD.itemsize, -1).T.copy().view(_WORD)[:, 0].astype(np.int64)
    num_tokens, num_rows = words[:2].tolist()
    if num_tokens != len(token_ids) or not 1 <= num_rows <= num_tokens:
        raise ValueError(f"kept tokens of {num_tokens} tokens in {num_rows} rows are with {len(token_ids)}")
    numbers, gaps = words[2 : 2 + num_rows], words[2 + num_rows :]
    counts = numbers >> 1
    if len(numbers) < num_rows or int(counts.sum()) != len(gaps):
        raise ValueError(f"kept tokens state {counts.sum()} ids and have {len(gaps)}")
    # Gaps count the ids between two ids, so ids ascend for any bytes.
    up_to = np.cumsum(gaps + 1)
    before = np.concatenate([np.zeros(1, dtype=np.int64), up_to])[np.cumsum(counts) - counts]
    flat = up_to - np.repeat(before, counts) - 1
    if int(flat.max(initial=0)) > _LARGEST_ID:
        raise ValueError(f"kept tokens have the id {flat.max()}")
    left_out = (numbers & 1).astype(np.bool_)
    # A sampled token must be one that could be drawn.
    of_id = np.repeat(np.arange(num_rows), counts)
    wrong = left_out[of_id] & (flat == token_ids[of_id])
    if wrong.any():
        at = int(of_id[wrong][0])
        raise ValueError(f"token {token_ids[at]} (number {at}) is not among those that could be drawn there")
    return left_out, counts, flat


# --- Causes of rollouts without a reward that the policy has not caused, as replicas report and the run counts them.


class MaskedCount(enum.StrEnum):
    """Counters of samples, by policy and cause: the orchestrator counts them, ``rollmill watch`` shows them."""

    MASKED = "masked"  # left out of training
    REDRAWN = "redrawn"  # repeated

    def of(self, policy: str, cause: MaskedCause) -> str:
        """
        >>> MaskedCount.MASKED.of("model0", MaskedCause.CAPACITY)
        'masked/model0/capacity'
        """
        return f"{self}/{policy}/{cause}"


class MaskedCause(enum.StrEnum):
    """The failed part. ``advice`` says where to look."""

    GRADER_FAILED = "grader_failed"  # a reward or judgement that says nothing about the answer
    EPISODE_LOST = "episode_lost"  # the environment, a live process or the tools of a trajectory
    CAPACITY = "capacity"  # the gateway or an engine was full for longer than the longest wait
    DEADLINE = "deadline"  # a named wait ran out
    INFRASTRUCTURE = "infrastructure"  # a peer, a process or the machine
    REPLICA_LOST = "replica_lost"  # too many replicas were lost while they played it
    INVALID_RECORD = "invalid_record"  # the record was refused
    ROLLOUT_TIMEOUT = (
        "rollout_timeout"  # the policy was too slow; with rollout.on_timeout it may be scored all the same
    )
    OTHER = "other"  # an exception in a workflow, tool or reward of the user

    @property
    def is_of_machinery(self) -> bool:
        """Whether the reason counts for ``rollout.max_masked_share``: masking by a rule of the recipe does not."""
        return self is not MaskedCause.ROLLOUT_TIMEOUT

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    MaskedCause.GRADER_FAILED: "read the gateway's log about the grader and the failing rows",
    MaskedCause.EPISODE_LOST: "read the gateway's log about its environments and live processes",
    MaskedCause.CAPACITY: "raise envgateway.sandbox.num_slots or add workers, or play fewer rollouts at once",
    MaskedCause.DEADLINE: "see which wait the failures name; raise rollout.timeout_s where it is the rollout's",
    MaskedCause.INFRASTRUCTURE: "see which peer the failures name, and its log",
    MaskedCause.REPLICA_LOST: "see why replicas die: memory, their logs",
    MaskedCause.INVALID_RECORD: "see which rule the records break; replicas of another release send such",
    MaskedCause.ROLLOUT_TIMEOUT: "raise rollout.timeout_s, or lower the token budgets",
    MaskedCause.OTHER: "read the failures of the workflow, the tools and the reward",
}
REPLICAS_LOST, INVALID_RECORD = "REPLICAS_LOST", "INVALID_RECORD"
_CAUSES = {
    errors.GraderFailedError.reason: MaskedCause.GRADER_FAILED,
    errors.EpisodeNotFoundError.reason: MaskedCause.EPISODE_LOST,
    errors.CapacityError.reason: MaskedCause.CAPACITY,
    errors.DeadlineError.reason: MaskedCause.DEADLINE,
    errors.InfrastructureError.reason: MaskedCause.INFRASTRUCTURE,
    errors.RolloutTimeoutError.reason: MaskedCause.ROLLOUT_TIMEOUT,
    REPLICAS_LOST: MaskedCause.REPLICA_LOST,
    INVALID_RECORD: MaskedCause.INVALID_RECORD,
}


def cause_of(reason: str) -> MaskedCause:
    """Of a failure's reason, which is a replica's word and may be anything.

    >>> cause_of("GRADER_FAILED"), cause_of("ValueError")
    (<MaskedCause.GRADER_FAILED: 'grader_failed'>, <MaskedCause.OTHER: 'other'>)
    """
    return _CAUSES.get(reason, MaskedCause.OTHER)
