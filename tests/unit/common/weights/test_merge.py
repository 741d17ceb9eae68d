"""Consecutive deltas become one that gives the newest version from the oldest, with only the newest at hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.weights.codec import CHUNK_ELEMENTS, decode_tensor, encode_tensor, merge_tensor
from services.common.weights.elements import Bits
from tests.unit.common.weights.test_codec import apply, dtypes, random_bits, seeds, stepped, weight_bits


@settings(max_examples=60, deadline=None)
@given(dtypes, st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.6, -1.0]), min_size=1, max_size=8), seeds)
def test_a_merged_delta_gives_the_newest_version_bit_for_bit(dtype: str, shares: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    versions: list[Bits] = [weight_bits(rng, 8000, dtype)]
    for share in shares:  # -1: everything anew, which makes raw chunks
        last = versions[-1]
        versions.append(random_bits(rng, len(last), dtype) if share < 0 else stepped(rng, last, share))
    deltas = [encode_tensor(old, new, dtype) for old, new in pairwise(versions)]
    merged = merge_tensor(deltas, versions[-1], dtype)
    assert np.array_equal(apply(versions[0], merged, dtype), versions[-1])


def test_an_element_that_changes_and_changes_back_is_not_in_it() -> None:
    rng = np.random.default_rng(0)
    first = weight_bits(rng, 5000, "bfloat16")
    second = stepped(rng, first, 0.05)
    there, back = encode_tensor(first, second, "bfloat16"), encode_tensor(second, first, "bfloat16")
    assert merge_tensor([there, back], first, "bfloat16") == b""


def test_versions_without_a_change_add_nothing() -> None:
    rng = np.random.default_rng(0)
    first = weight_bits(rng, 5000, "bfloat16")
    second = stepped(rng, first, 0.05)
    delta = encode_tensor(first, second, "bfloat16")
    assert merge_tensor([b"", delta, b""], second, "bfloat16") == delta
    assert merge_tensor([b"", b""], second, "bfloat16") == b""


def test_chunks_that_change_in_different_versions_meet_in_order() -> None:
    rng = np.random.default_rng(1)
    versions = [weight_bits(rng, 3 * CHUNK_ELEMENTS, "bfloat16")]
    for chunk in (2, 0, 1, 0):
        new = versions[-1].copy()
        part = slice(chunk * CHUNK_ELEMENTS, (chunk + 1) * CHUNK_ELEMENTS)
        new[part] = stepped(rng, new[part], 0.001)
        versions.append(new)
    deltas = [encode_tensor(old, new, "bfloat16") for old, new in pairwise(versions)]
    merged = merge_tensor(deltas, versions[-1], "bfloat16")
    assert [c.start for c in decode_tensor(versions[0], merged, "bfloat16")] == [0, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS]
    assert np.array_equal(apply(versions[0], merged, "bfloat16"), versions[-1])


def test_eight_versions_merged_take_no_more_bytes_than_the_direct_delta() -> None:
    rng = np.random.default_rng(2)
    versions = [weight_bits(rng, 400_000, "bfloat16")]
    for _ in range(8):
        versions.append(stepped(rng, versions[-1], 0.01))
    deltas = [encode_tensor(old, new, "bfloat16") for old, new in pairwise(versions)]
    merged = merge_tensor(deltas, versions[-1], "bfloat16")
    direct = encode_tensor(versions[0], versions[-1], "bfloat16")
    assert len(merged) <= 1.05 * len(direct)
