"""Buckets of a bounded size: in order, complete, none larger than needed."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import in_buckets


@given(st.lists(st.integers(0, 20)), st.integers(0, 30))
def test_buckets_hold_everything_in_order_and_are_as_few_as_neighbours_allow(sizes: list[int], most: int) -> None:
    found = list(in_buckets(sizes, lambda size: size, most))
    assert list(chain(*found)) == sizes
    assert all(found), "none is empty"
    assert all(sum(bucket) <= most or len(bucket) == 1 for bucket in found)
    assert all(sum(bucket) + following[0] > most for bucket, following in pairwise(found))
