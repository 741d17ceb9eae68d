"""Batches: one for every step, the same for all ranks and after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import (
    DeadlineError,
    InvalidRequestError,
)
from services.common.records import TokenSequence
from services.orchestrator.buffer import batches
from services.orchestrator.buffer.assembly import assemble, rank_share, spread
from services.orchestrator.journal.entries import BatchRecord
from tests.unit.common.test_serde import same
from tests.unit.orchestrator.builders import advantage_groups, complete_group
from tests.unit.orchestrator.world import World


async def test_batch_is_the_same_when_asked_again_with_other_rank_count(worlds: Callable[..., World]) -> None:
    world = worlds(minibatches=2)
    for order in (await world.begin())[1]:
        await world.play(order)
    batch = await world.pull(1)
    whole = batch.share(0, 1)
    assert not batch.replayed
    await world.crash()
    again = await world.pull(1)
    assert again.replayed
    assert again.record == batch.record
    for num_ranks in (1, 2, 3):
        shares = [again.share(rank, num_ranks) for rank in range(num_ranks)]
        assert {share.minibatches for share in shares} == {whole.minibatches}
        found = sorted((s for share in shares for s in share.sequences), key=lambda s: (s.minibatch, s.position))
        assert same(tuple(found), whole.sequences)


async def test_a_large_batch_is_put_together_beside_the_event_loop(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()

    def noted(*arguments: Any) -> tuple[BatchRecord, dict[str, TokenSequence]]:
        threads.add(threading.get_ident())
        return assemble(*arguments)

    monkeypatch.setattr(batches, "assemble", noted)
    found = []
    for most_at_once in (1024, 1):
        monkeypatch.setattr(batches, "MOST_AT_ONCE", most_at_once)
        world = worlds()
        await world.publish(0)
        asking = [asyncio.ensure_future(world.pull(1)) for _ in range(3)]
        world.train()
        for order in await world.orders(world.join()):
            await world.play(order)
        pulled = await asyncio.gather(*asking)
        assert all(batch.record is pulled[0].record for batch in pulled)
        assert world.core.batches["model0"].newest_step == 1
        is_beside = threading.get_ident() not in threads
        found.append((is_beside, [(e.minibatch, e.position, e.num_tokens, e.reward) for e in pulled[0].record.entries]))
        threads.clear()
    assert [is_beside for is_beside, _ in found] == [False, True]
    assert found[0][1] == found[1][1]


async def test_a_pull_without_sequences_names_what_it_waited_for(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    with pytest.raises(DeadlineError, match=r"model0: batch of step 1 \(8 sequences\) took longer"):
        await world.trainer_api.pull_batch("model0", 1, 0.05)
    with pytest.raises(InvalidRequestError, match="newest recorded batch is that of step 0"):
        await world.trainer_api.pull_batch("model0", 2, 0.05)
    with pytest.raises(InvalidRequestError, match="the run has 3 steps"):
        await world.trainer_api.pull_batch("model0", 4, 0.05)


# --- shares of ranks


token_counts = st.lists(st.integers(0, 2000), min_size=1, max_size=60)


@given(num_tokens=token_counts, num_bins=st.integers(1, 6))
def test_bins_differ_by_at_most_one_sequence_of_tokens(num_tokens: list[int], num_bins: int) -> None:
    bins = spread(num_tokens, num_bins)
    totals = [sum(n for n, b in zip(num_tokens, bins, strict=True) if b == i) for i in range(num_bins)]
    assert max(totals) - min(totals) <= max(num_tokens)
    if len(num_tokens) >= num_bins:
        assert set(bins) == set(range(num_bins))


@given(num_tokens=token_counts, num_minibatches=st.integers(1, 4), num_ranks=st.integers(1, 5))
def test_union_of_rank_shares_is_the_minibatch(num_tokens: list[int], num_minibatches: int, num_ranks: int) -> None:
    minibatch_of = spread(num_tokens, num_minibatches)
    shares = [rank_share(num_tokens, minibatch_of, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(p for share in shares for p in share) == list(range(len(num_tokens)))
    for minibatch in range(num_minibatches):
        whole = [p for p, m in enumerate(minibatch_of) if m == minibatch]
        assert sorted(p for share in shares for p in share if minibatch_of[p] == minibatch) == whole


def test_a_rank_that_does_not_exist_has_no_share() -> None:
    with pytest.raises(ValueError, match="rank is 2"):
        rank_share([1], [0], 2, 2)


def test_minibatch_totals_and_positions_know_no_ranks() -> None:
    groups = [advantage_groups(complete_group(f"g{i}", [0.0, 1.0, 1.0], version=i))[0] for i in range(4)]
    record, sequences = assemble("model0", 5, groups, 2, {"failures": 1.0})
    assert sum(m.num_sequences for m in record.minibatches) == len(record.entries) == len(sequences) == 12
    assert [m.num_trained_tokens for m in record.minibatches] == [24, 24]
    for minibatch in range(2):
        positions = [e.position for e in record.entries if e.minibatch == minibatch]
        assert positions == list(range(len(positions)))
    assert {e.sequence_id.split("/")[0]: e.staleness for e in record.entries} == {"g0": 4, "g1": 3, "g2": 2, "g3": 1}
    assert record.statistics["staleness_max"] == 4.0
    assert record.statistics["failures"] == 1.0
