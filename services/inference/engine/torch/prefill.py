"""Plans prefill for many rows: the rows that share a prefix, and the rows that are padded into one forward pass.

Pure planning over token arrays; independent of torch, slots' contents and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.inference.engine.torch.slots import MIN_SHARED_HALF

MAX_PASS_TOKENS = 4096  # padded tokens in one forward pass: bounds memory, and the time that decoding waits
MAX_PADDING = 1.25  # padded tokens over real ones in one forward pass
PASS_COST = 48  # tokens that one more pass is worth, measured on one core


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of a slot whose KV is to be computed."""

    slot: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def plan_sharing(rows: Sequence[npt.NDArray[np.int32]]) -> dict[int, tuple[int, int]]:
    """Assign to rows another row as the source of their prefix: {follower: (leader, shared positions)}; leaders are absent.

    Sorting puts rows with common prefixes side by side. A row follows the current leader when that saves at
    least half of the row, and the next row does not share more with this row (then this row leads the next ones).
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    followers: dict[int, tuple[int, int]] = {}
    leader = -1
    shared = 0  # of the current row with the leader
    for row, with_next in zip(order, _shared_with_next([rows[i] for i in order]), strict=True):
        # Under byte order a row's common prefix with the leader is the least of those in between.
        if leader >= 0 and shared >= max(MIN_SHARED_HALF, len(rows[row]) / 2, with_next):
            followers[row] = (leader, shared)
            shared = min(shared, with_next)
        else:
            leader, shared = row, with_next
    return followers


def plan_passes(spans: Sequence[Span]) -> list[list[Span]]:
    """Batches of spans of similar length. Long spans are cut, and their parts come in order."""
    pieces: list[list[Span]] = []  # pieces[k]: the k-th part of every span that has one
    for span in spans:
        for k, start in enumerate(range(span.start, span.stop, MAX_PASS_TOKENS)):
            if k == len(pieces):
                pieces.append([])
            stop = min(start + MAX_PASS_TOKENS, span.stop)
            pieces[k].append(span if stop - start == span.num_tokens else Span(span.slot, start, stop))
    passes: list[list[Span]] = []
    for generation in pieces:
        # Fresh rows (start 0) apart from the others: they need not read the cache back.
        generation.sort(key=lambda s: (s.start > 0, -s.num_tokens))
        batch: list[Span] = []
        real = width = 0
        for span in generation:
            num = span.num_tokens
            padded = (len(batch) + 1) * width
            fits = not batch or (
                padded <= MAX_PASS_TOKENS
                and padded <= max(MAX_PADDING * (real + num), real + num + PASS_COST)
                and (batch[0].start > 0) == (span.start > 0)
            )
            if not fits:
                passes.append(batch)
                batch, real = [], 0
            if not batch:
                width = num
            batch.append(span)
            real += num
        if batch:
            passes.append(batch)
    return passes


def _shared_with_next(rows: Sequence[npt.NDArray[np.int32]]) -> list[int]:
    """For each row, the number of leading tokens that it has in common with the row behind it; 0 for the last one."""
    if not rows:
        return []
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max() + 1), dtype=np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    differs = tokens[:-1] != tokens[1:]
    differs[:, -1] = True
    shared = np.minimum(differs.argmax(axis=1), np.minimum(lengths[:-1], lengths[1:]))
    return [*shared.tolist(), 0]
