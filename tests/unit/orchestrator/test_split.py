from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.buffer.assembly import assemble, rank_share, spread
from tests.unit.orchestrator.builders import advantage_groups, complete_group

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
