"""The set of tokens that a sampler could draw, for each sampled token, packed into bytes.

Top-k, top-p, min-p and ``min_new_tokens`` cut the distribution that a token is drawn from. An engine records the
remaining ids (``kept_rows``, ``left_out_row``), a segment carries them packed (``pack``), and the trainer takes its
log-probabilities over the same sets (``unpack``). No bytes at all: every token was drawn from the whole vocabulary.

    row       the set                                   header        payload
    KEPT      the sampled token and these ids           count, 0      ascending ids as varints of the gaps between them
    LEFT_OUT  the vocabulary without these ids          count, 1      the same
    BITS      the ids with their bit set                bytes, 2      a bit per id, lowest first
    AGAIN     the row before, for this many tokens      tokens, 3     -

AGAIN is for rows of at most ``MOST_REPEATED`` ids, so the unpacked size is never much larger than the bytes.

    packed = size of all headers (uint32), size of all gaps (uint32), headers, gaps, bits; a header is the varint of
    (number << 2 | kind)

A single token that could be drawn is a header without a payload, and a run of equal short rows is two headers.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.common import errors

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
MOST_REPEATED = 256
_PREFIX = np.dtype("<u4")
_PREFIX_BYTES = 2 * _PREFIX.itemsize
_MOST_VARINT_BYTES = 5
_BEHIND = np.iinfo(np.int64).max  # sorts behind every id


class RowKind(enum.IntEnum):
    """How a row is written."""

    KEPT = 0
    LEFT_OUT = 1
    BITS = 2
    AGAIN = 3


class KeptRow(NamedTuple):
    """The set of one sampled token. ``number``: ids, or bytes of ``BITS``."""

    kind: RowKind
    number: int
    payload: bytes


WHOLE = KeptRow(RowKind.LEFT_OUT, 0, b"")  # the whole vocabulary


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


# -- rows -----------------------------------------------------------------------------------------------------------


def kept_rows(ids: Ints, counts: Ints, sampled: Ints, vocab_size: int | None = None) -> list[KeptRow]:
    """Rows for the first ``counts`` [n] of ``ids`` [n, width], in any order, and the tokens ``sampled`` [n].

    A sampled token that is not among the ids belongs to the set all the same. With ``vocab_size`` a large set is written
    as the missing tokens or as bits, where that is smaller.
    """
    others = np.arange(ids.shape[1]) < counts[:, None]
    others &= ids != sampled[:, None]
    numbers = others.sum(axis=1)
    ordered = np.sort(np.where(others, ids, _BEHIND), axis=1)[:, : int(numbers.max(initial=0))]
    flat = ordered[np.arange(ordered.shape[1]) < numbers[:, None]]
    payloads = _gap_payloads(flat, numbers)
    rows = []
    start = 0
    for number, payload, token in zip(numbers.tolist(), payloads, sampled.tolist(), strict=True):
        row = KeptRow(RowKind.KEPT, number, payload)
        if vocab_size is not None and len(payload) > vocab_size // 8:
            row = _large_row(np.append(flat[start : start + number], token), vocab_size)
        rows.append(row)
        start += number
    return rows


def left_out_row(ids: Sequence[int]) -> KeptRow:
    """The row of a token that was drawn from the vocabulary without these ids."""
    ordered = np.unique(np.asarray(ids, dtype=np.int64))
    return KeptRow(RowKind.LEFT_OUT, len(ordered), _varints(_gaps(ordered, np.array([len(ordered)])))[0].tobytes())


def _large_row(kept: Ints, vocab_size: int) -> KeptRow:
    """Bits, or the ids that are left out where those are fewer bytes."""
    flags = np.zeros(vocab_size, dtype=np.bool_)
    flags[kept] = True
    bits = np.packbits(flags, bitorder="little").tobytes()
    without = left_out_row(np.flatnonzero(~flags).tolist()) if vocab_size - len(kept) < len(bits) else None
    if without is not None and len(without.payload) < len(bits):
        return without
    return KeptRow(RowKind.BITS, len(bits), bits)


def _most_ids(kind: int, number: int) -> int:
    """How many ids a row can have by its header."""
    return 8 * number if kind == RowKind.BITS else number


# -- packing --------------------------------------------------------------------------------------------------------


def pack(rows: Sequence[KeptRow], num_tokens: int) -> bytes:
    """The bytes of ``num_tokens`` tokens: of ``rows``, and of the whole vocabulary for those behind them.

    Without a row there are no bytes.
    """
    if len(rows) > num_tokens:
        raise ValueError(f"{len(rows)} rows for {num_tokens} tokens")
    if not rows:
        return b""
    runs: list[tuple[KeptRow, int]] = []
    for row, length in [*((row, 1) for row in rows), (WHOLE, num_tokens - len(rows))]:
        if runs and runs[-1][0] == row and _most_ids(row.kind, row.number) <= MOST_REPEATED:
            runs[-1] = (row, runs[-1][1] + length)
        elif length:
            runs.append((row, length))
    headers = []
    for row, length in runs:
        headers.append(row.number << 2 | row.kind)
        if length > 1:
            headers.append((length - 1) << 2 | RowKind.AGAIN)
    head = _varints(np.array(headers, dtype=np.int64))[0].tobytes()
    gaps = b"".join(row.payload for row, _ in runs if row.kind is not RowKind.BITS)
    bits = b"".join(row.payload for row, _ in runs if row.kind is RowKind.BITS)
    return np.array([len(head), len(gaps)], dtype=_PREFIX).tobytes() + head + gaps + bits


def unpack(packed: bytes, token_ids: npt.NDArray[np.int32]) -> KeptSets:
    """The sets of the tokens ``token_ids``. ``ValueError``: the bytes are not those of a sampler that drew these tokens."""
    if not packed:
        return KeptSets.whole(len(token_ids))
    read = _Read(packed, token_ids)
    left_out = read.kinds == RowKind.LEFT_OUT
    numbers, flat = read.ids()
    starts = np.cumsum(numbers) - numbers
    per_token = numbers[read.row_of_token]
    rows = np.repeat(np.arange(len(token_ids)), per_token)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(per_token) - per_token, per_token)
    ids = flat[starts[read.row_of_token][rows] + within]
    own = np.flatnonzero(read.kinds[read.row_of_token] == RowKind.KEPT)  # whose sampled token is not written
    rows, ids = np.concatenate([rows, own]), np.concatenate([ids, token_ids[own]])
    order = np.argsort(rows, kind="stable")
    return KeptSets(left_out[read.row_of_token], rows[order], ids[order])


def check(packed: bytes, token_ids: npt.NDArray[np.int32], vocab_size: int | None = None) -> None:
    """Check that ``unpack`` takes the bytes, without making the sets, and that every id is below ``vocab_size`` if
    given. Raises ``ValueError`` with the defect."""
    if packed:
        read = _Read(packed, token_ids)
        if vocab_size is not None and (largest := read.largest_id()) >= vocab_size:
            raise ValueError(f"kept tokens have the id {largest}, and the policy has ids 0 to {vocab_size - 1}")


def head(packed: bytes, token_ids: npt.NDArray[np.int32], num_tokens: int) -> bytes:
    """The bytes of the first ``num_tokens`` of these tokens."""
    if not packed:
        return packed
    read = _Read(packed, token_ids)
    rows = read.as_rows()
    return pack([rows[row] for row in read.row_of_token[:num_tokens].tolist()], num_tokens)


class _Read:
    """Packed bytes, taken apart and checked."""

    def __init__(self, packed: bytes, token_ids: npt.NDArray[np.int32]) -> None:
        data = np.frombuffer(packed, dtype=np.uint8)
        if len(data) < _PREFIX_BYTES:
            raise ValueError(f"kept tokens of {len(data)} bytes are cut off")
        num_header, num_gap = (int(size) for size in np.frombuffer(packed, dtype=_PREFIX, count=2))
        if _PREFIX_BYTES + num_header + num_gap > len(data):
            raise ValueError(f"kept tokens of {len(data)} bytes state {num_header} of headers and {num_gap} of gaps")
        data = data[_PREFIX_BYTES:]
        headers, _ = _read_varints(data[:num_header])
        again = headers & 3 == RowKind.AGAIN
        if not len(headers) or again[0]:
            raise ValueError("kept tokens begin without a row")
        row_of_header = np.cumsum(~again) - 1
        tokens = np.where(again, headers >> 2, 1)
        if tokens.sum() != len(token_ids):
            raise ValueError(f"kept tokens of {tokens.sum()} tokens are with {len(token_ids)}")
        repeated = headers[~again][row_of_header[again]]
        most_ids = max((_most_ids(header & 3, header >> 2) for header in np.unique(repeated).tolist()), default=0)
        if most_ids > MOST_REPEATED:
            raise ValueError(f"kept tokens repeat a row of up to {most_ids} ids; at most {MOST_REPEATED} are repeated")
        self.row_of_token = np.repeat(row_of_header, tokens)  # [num_tokens]
        self.kinds = headers[~again] & 3  # [num_rows], as the following
        self.numbers = headers[~again] >> 2
        self.bits: Bytes = data[num_header + num_gap :]
        is_bits = self.kinds == RowKind.BITS
        if int(self.numbers[is_bits].sum()) != len(self.bits):
            raise ValueError(f"kept tokens state {self.numbers[is_bits].sum()} bytes of bits and have {len(self.bits)}")
        self.gap_counts = np.where(is_bits, 0, self.numbers)
        gaps, self._gap_ends = _read_varints(data[num_header : num_header + num_gap])
        if int(self.gap_counts.sum()) != len(gaps):
            raise ValueError(f"kept tokens state {self.gap_counts.sum()} ids and have {len(gaps)}")
        self._gap_bytes = data[num_header : num_header + num_gap]
        # Gaps count the ids between two ids, so ids ascend for any bytes.
        up_to = np.cumsum(gaps + 1)
        ends = np.cumsum(self.gap_counts)
        before = np.concatenate([np.zeros(1, dtype=np.int64), up_to])[ends - self.gap_counts]
        self.gap_ids = up_to - np.repeat(before, self.gap_counts) - 1
        self._check_sampled(token_ids.astype(np.int64))

    def _check_sampled(self, token_ids: Ints) -> None:
        """A sampled token must be one that could be drawn."""
        left_out = np.repeat(self.kinds == RowKind.LEFT_OUT, self.gap_counts)
        row_of_gap = np.repeat(np.arange(len(self.kinds)), self.gap_counts)
        cut = np.isin(
            self.row_of_token << 36 | token_ids, row_of_gap[left_out] << 36 | self.gap_ids[left_out]
        )  # an id of five bytes has 35 bits
        in_bits = np.flatnonzero(self.kinds[self.row_of_token] == RowKind.BITS)
        if len(in_bits):
            rows, tokens = self.row_of_token[in_bits], token_ids[in_bits]
            sizes = np.where(self.kinds == RowKind.BITS, self.numbers, 0)
            inside = (tokens >= 0) & (tokens >> 3 < sizes[rows])
            place = np.where(inside, (np.cumsum(sizes) - sizes)[rows] + (tokens >> 3), 0)
            cut[in_bits] = ~inside | (self.bits[place] >> (tokens & 7).astype(np.uint8) & 1 == 0)
        if cut.any():
            at = int(np.flatnonzero(cut)[0])
            raise ValueError(f"token {token_ids[at]} (number {at}) is not among those that could be drawn there")

    def ids(self) -> tuple[Ints, Ints]:
        """How many ids each row has, and all of them, row after row."""
        is_bits = self.kinds == RowKind.BITS
        if not is_bits.any():
            return self.gap_counts, self.gap_ids
        sizes = np.where(is_bits, self.numbers, 0)
        flags = np.unpackbits(self.bits, bitorder="little")
        row_of_bit = np.repeat(np.arange(len(sizes)), 8 * sizes)
        set_bits = np.flatnonzero(flags)
        rows = np.concatenate([np.repeat(np.arange(len(sizes)), self.gap_counts), row_of_bit[set_bits]])
        first_bit = 8 * (np.cumsum(sizes) - sizes)
        ids = np.concatenate([self.gap_ids, set_bits - first_bit[row_of_bit[set_bits]]])
        return np.bincount(rows, minlength=len(sizes)), ids[np.argsort(rows, kind="stable")]

    def largest_id(self) -> int:
        """Of all rows, the sampled tokens aside; -1 without any."""
        largest = int(self.gap_ids.max(initial=-1))
        sizes = self.numbers[self.kinds == RowKind.BITS]
        ends = np.cumsum(sizes)
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True):
            used = np.flatnonzero(self.bits[end - size : end])
            if len(used):
                last = int(used[-1])
                largest = max(largest, 8 * last + int(self.bits[end - size + last]).bit_length() - 1)
        return largest

    def as_rows(self) -> list[KeptRow]:
        """The rows as they were before packing, without those that repeat one."""
        ends = np.concatenate([np.zeros(1, dtype=np.int64), self._gap_ends])[np.cumsum(self.gap_counts)]
        rows, gap, bit = [], 0, 0
        for kind, number, end in zip(self.kinds.tolist(), self.numbers.tolist(), ends.tolist(), strict=True):
            if kind == RowKind.BITS:
                payload, bit = self.bits[bit : bit + number].tobytes(), bit + number
            else:
                payload, gap = self._gap_bytes[gap:end].tobytes(), end
            rows.append(KeptRow(RowKind(kind), number, payload))
        return rows


# -- varints --------------------------------------------------------------------------------------------------------


def _gaps(flat: Ints, counts: Ints) -> Ints:
    """The gap before the first of each row's ascending ids, and between two of them."""
    gaps = np.diff(flat, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = flat[first]
    return gaps


def _gap_payloads(flat: Ints, counts: Ints) -> list[bytes]:
    data, ends = _varints(_gaps(flat, counts))
    cuts = np.concatenate([np.zeros(1, dtype=np.int64), ends])[np.concatenate([[0], np.cumsum(counts)])].tolist()
    joined = data.tobytes()
    return [joined[start:end] for start, end in itertools.pairwise(cuts)]


def _varints(values: Ints) -> tuple[Bytes, Ints]:
    """Seven bits a byte, lowest first, the eighth set where more follow; and where each value ends."""
    sizes = np.ones(len(values), dtype=np.int64)
    for place in range(1, _MOST_VARINT_BYTES):
        sizes += values >= 1 << 7 * place
    ends = np.cumsum(sizes)
    data = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        has = sizes > place
        more = (sizes[has] > place + 1).astype(np.int64) << 7
        data[(ends - sizes)[has] + place] = values[has] >> 7 * place & 0x7F | more
    return data, ends


def _read_varints(data: Bytes) -> tuple[Ints, Ints]:
    """Values, and where each ends."""
    ends = np.flatnonzero(data < 0x80) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        raise ValueError("a number of kept tokens is cut off")
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]) if len(ends) else ends
    sizes = ends - starts
    if sizes.max(initial=0) > _MOST_VARINT_BYTES:
        raise ValueError(f"a number of kept tokens has {sizes.max()} bytes")
    values = np.zeros(len(ends), dtype=np.int64)
    for place in range(int(sizes.max(initial=0))):
        has = sizes > place
        values[has] |= (data[starts[has] + place].astype(np.int64) & 0x7F) << 7 * place
    return values, ends


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
