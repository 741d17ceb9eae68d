"""Keeps the KV of the slots: joins prompts with cached prefixes, computes the rest, and makes room where memory is bounded.

A request joins when there are blocks for all the tokens that it and the running ones may have, so a running row never lacks
one. The caches of ended requests take what is left: they give way to running rows, the one unused for longest first. The
pool holds at least one sequence of the whole context, so every request ends.

Prefill is planned for many rows at once: the rows that share a prefix, and the rows that are padded into one forward pass.
Independent of requests and sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.config.processes import blocks_of
from services.inference.engine.base import KvUse
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.slots import MIN_SHARED_HALF, SlotTable

MAX_PASS_TOKENS = 4096  # padded tokens in one forward pass: bounds memory, and the time that decoding waits
MAX_PADDING = 1.25  # padded tokens over real ones in one forward pass
PASS_COST = 48  # tokens that one more pass is worth, measured on one core


@dataclass(slots=True)
class Counters:
    """Since start. ``prefilled`` counts positions computed, ``reused`` positions taken from a cache or a sibling."""

    generated: int = 0
    prefilled: int = 0
    reused: int = 0
    steps: int = 0
    evicted: int = 0  # caches of ended requests that were given up for their memory


class KvKeeper:
    def __init__(self, decoder: Decoder, table: SlotTable, counters: Counters) -> None:
        self._decoder = decoder
        self._table = table
        self._counters = counters
        self._cache = decoder.cache

    @property
    def use(self) -> KvUse:
        """The state of the pool of blocks."""
        cache = self._cache
        return KvUse(
            blocks=cache.num_blocks,
            used=cache.num_blocks - cache.num_free,
            shared=int(np.count_nonzero(cache.refs > 1)),
            evicted=self._counters.evicted,
        )

    # -- joining ------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Blocks that no running row will ever need."""
        table = self._table
        return self._cache.num_blocks - sum(map(blocks_of, table.max_length[table.live].tolist()))

    def attach(self, slot: int, source: int, num_positions: int) -> None:
        """The leading positions of ``source`` become the slot's; other ones of the slot are dropped."""
        if num_positions:
            self._cache.share(source, [slot], num_positions)
        else:
            self._cache.cut(slot, 0)

    # -- computing ----------------------------------------------------------------------------------------------

    def compute(self, slots: Sequence[int]) -> None:
        """Compute the KV of these slots for all but their last token; a prefix shared by several is computed once."""
        table = self._table
        rows = [table.tokens[slot, : table.length[slot] - 1] for slot in slots]
        followers: dict[tuple[int, int], list[int]] = {}  # (leader, shared positions) -> slots that take them
        leaders = list(slots)
        for row, (leader, shared) in plan_sharing(rows).items():
            if shared > table.cached[slots[row]]:
                followers.setdefault((slots[leader], shared), []).append(slots[row])
                leaders.remove(slots[row])
        self._extend(leaders)
        for (leader, shared), members in followers.items():
            self._cache.share(leader, members, shared)
            self._counters.reused += int((shared - table.cached[members]).sum())
            table.cached[members] = shared
        self._extend([slot for members in followers.values() for slot in members])

    def grow(self) -> None:
        """Make the last position of every live row writable."""
        live = self._table.live.nonzero()[0]
        end = self._table.length[live]
        self._cache.own(live, end - 1, end, self._caches())

    # -- dropping -----------------------------------------------------------------------------------------------

    def released(self, slot: int) -> None:
        """A request has left the slot: keep the valid positions as a cache."""
        self._cache.cut(slot, int(self._table.cached[slot]))

    def forget(self, *, live: bool = False) -> None:
        """Drop the caches of all slots without a request; with ``live`` also the KV of running rows."""
        dropped = np.arange(self._table.num_slots) if live else (~self._table.live).nonzero()[0]
        self._table.cached[dropped] = 0
        for slot in dropped.tolist():
            self._cache.cut(slot, 0)

    def clear(self, slot: int) -> None:
        """Drop the KV of a slot whose values are not finite, because NaN would pass the mask."""
        self._cache.clear(slot)
        self._table.cached[slot] = 0
        self._cache.cut(slot, 0)

    def _caches(self) -> Iterator[int]:
        """Slots without a request whose caches are given up for their memory, the one unused for longest first."""
        table = self._table
        while True:
            caches = (~table.live & (table.cached > 0)).nonzero()[0]
            victim = int(caches[table.last_used[caches].argmin()])
            table.cached[victim] = 0
            self._counters.evicted += 1
            yield victim

    def _extend(self, slots: Sequence[int]) -> None:
        table, decoder = self._table, self._decoder
        spans = [Span(slot, int(table.cached[slot]), int(table.length[slot]) - 1) for slot in slots]
        spans = [span for span in spans if span.num_tokens > 0]
        if not spans:
            return
        places, starts, stops = np.asarray([(span.slot, span.start, span.stop) for span in spans], dtype=np.int64).T
        self._cache.own(places, starts, stops, self._caches())
        longest = decoder.extends_up_to
        if each := [span for span in spans if span.stop <= longest]:
            decoder.extend_each(
                np.concatenate([np.full(span.num_tokens, span.slot) for span in each]),
                np.concatenate([table.tokens[span.slot, span.start : span.stop] for span in each], dtype=np.int64),
                np.concatenate([np.arange(span.start, span.stop) for span in each]),
            )
        for batch in plan_passes([span for span in spans if span.stop > longest]):
            tokens = np.zeros((len(batch), batch[0].num_tokens), dtype=np.int64)
            for row, span in enumerate(batch):
                tokens[row, : span.num_tokens] = table.tokens[span.slot, span.start : span.stop]
            decoder.extend(
                np.asarray([span.slot for span in batch]),
                torch.from_numpy(tokens).to(decoder.device),
                np.asarray([span.start for span in batch]),
                fresh=batch[0].start == 0,
            )
        for span in spans:
            table.cached[span.slot] = span.stop
            self._counters.prefilled += span.num_tokens


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
    if not rows:
        return {}
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    lengths = np.array([len(rows[i]) for i in order])
    tokens = np.zeros((len(rows), lengths.max() + 1), dtype=np.int32)
    for place, i in enumerate(order):
        tokens[place, : len(rows[i])] = rows[i]
    differs = tokens[:-1] != tokens[1:]
    differs[:, -1] = True
    # Leading tokens that each row has in common with the row behind it; 0 for the last one.
    common = [*np.minimum(differs.argmax(axis=1), np.minimum(lengths[:-1], lengths[1:])).tolist(), 0]
    followers: dict[int, tuple[int, int]] = {}
    leader = -1
    shared = 0  # of the current row with the leader
    for row, with_next in zip(order, common, strict=True):
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
