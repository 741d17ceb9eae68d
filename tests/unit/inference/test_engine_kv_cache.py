"""The KV cache: the life of its blocks, and its size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.config.processes import BLOCK_TOKENS, RESERVED_BLOCKS, blocks_of, least_blocks
from services.common.errors import ConfigError
from services.inference.engine.torch.kv import EMPTY, KvCache, KvShape

NUM_SLOTS = 6
CONTEXT = 3 * BLOCK_TOKENS + 7
SHAPE = KvShape(
    num_layers=2,
    num_slots=NUM_SLOTS,
    kv_heads=2,
    context_length=CONTEXT,
    head_dim=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
BLOCK_BYTES = BLOCK_TOKENS * SHAPE.token_bytes
LEAST_BYTES = least_blocks(CONTEXT) * BLOCK_BYTES


def write(cache: KvCache, slot: int, start: int, values: np.ndarray) -> None:
    """Write ``values`` [positions] of every head and dimension of both layers at ``start``."""
    places = cache.places(np.full(len(values), slot), start + np.arange(len(values)))
    heads = torch.from_numpy(values).to(torch.float32)[:, None, None].expand(-1, 4, 4)
    for index in range(2):
        cache.write(index, places, heads + index)


def read(cache: KvCache, slot: int, width: int) -> torch.Tensor:
    """What was written; every element of all heads, both layers, has to agree."""
    reach = cache.reach(np.array([slot]), width)
    parts = torch.stack([part - index for index in range(2) for part in cache.read(index, reach)])
    found = parts[0, 0, 0, :, 0]
    assert torch.equal(parts, found[None, None, None, :, None].expand_as(parts))
    return found


class OneCache(RuleBasedStateMachine):
    """Random life of the slots of a paged cache, against a dictionary of what each slot holds."""

    @initialize(num_blocks=st.integers(least_blocks(CONTEXT), 3 * least_blocks(CONTEXT)))
    def start(self, num_blocks: int) -> None:
        self.cache = KvCache(SHAPE, num_blocks * BLOCK_BYTES)
        self.held: dict[int, list[float]] = {slot: [] for slot in range(NUM_SLOTS)}
        self.next = 1.0

    @rule(slot=st.integers(0, NUM_SLOTS - 1), keep=st.integers(0, CONTEXT), num=st.integers(1, 2 * BLOCK_TOKENS))
    def write_on(self, slot: int, keep: int, num: int) -> None:
        start = min(keep, len(self.held[slot]))
        stop = min(start + num, CONTEXT)
        if start == stop:
            return
        others = [other for other in range(NUM_SLOTS) if other != slot and self.cache.held[other]]
        free = self.cache.num_free

        def victims() -> Iterator[int]:
            for other in others:
                assert not self.cache.num_free
                self.held[other] = []
                yield other

        self.cache.own(np.array([slot]), np.array([start]), np.array([stop]), victims())
        assert free < blocks_of(stop) or all(self.held[other] for other in others), "no slot loses blocks for nothing"
        values = self.next + np.arange(stop - start)
        self.next += len(values)
        write(self.cache, slot, start, values)
        self.held[slot] = [*self.held[slot][:start], *values.tolist()]

    @rule(
        source=st.integers(0, NUM_SLOTS - 1),
        others=st.sets(st.integers(0, NUM_SLOTS - 1)),
        num=st.integers(1, CONTEXT),
    )
    def share(self, source: int, others: set[int], num: int) -> None:
        num = min(num, len(self.held[source]))
        self.cache.share(source, sorted(others), num)
        prefix = self.held[source][:num]
        for target in others:
            self.held[target] = list(prefix)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), num=st.integers(0, CONTEXT))
    def cut(self, slot: int, num: int) -> None:
        self.cache.cut(slot, num)
        self.held[slot] = self.held[slot][:num]

    @rule(slot=st.integers(0, NUM_SLOTS - 1), position=st.integers(0, CONTEXT - 1))
    @precondition(lambda self: hasattr(self, "cache"))
    def write_without_owning(self, slot: int, position: int) -> None:
        """Rows without a request and padding write too: into blocks of their own behind the valid positions, or nowhere."""
        if position >= len(self.held[slot]):
            write(self.cache, slot, position, np.array([-1.0]))

    @invariant()
    def every_slot_holds_its_bits(self) -> None:
        for slot, values in getattr(self, "held", {}).items():
            if values:
                assert read(self.cache, slot, len(values)).tolist() == values

    @invariant()
    def blocks_are_free_or_counted(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        named = cache.table[cache.table != EMPTY]
        counts = np.bincount(named, minlength=len(cache.refs))
        assert np.array_equal(counts, cache.refs)
        free = set(cache._free)
        assert len(free) == cache.num_free and min(free, default=RESERVED_BLOCKS) >= RESERVED_BLOCKS
        assert free | set(named.tolist()) == set(range(RESERVED_BLOCKS, len(cache.refs)))
        assert not free & set(named.tolist())
        for slot, values in self.held.items():
            assert (cache.table[slot, : cache.held[slot]] != EMPTY).all()
            assert (cache.table[slot, cache.held[slot] :] == EMPTY).all()
            assert cache.held[slot] >= blocks_of(len(values))


TestOneCache = OneCache.TestCase
TestOneCache.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_a_limit_that_holds_no_sequence_is_refused_with_one_that_does() -> None:
    cache = KvCache(SHAPE, LEAST_BYTES)
    assert cache.kv.nbytes == LEAST_BYTES
    cache.own(np.array([3]), np.array([0]), np.array([CONTEXT]), iter(()))
    with pytest.raises(ConfigError, match=r"kv_cache_gib is .*one sequence of 103 tokens needs .*raise kv_cache_gib"):
        KvCache(SHAPE, LEAST_BYTES - 1)
