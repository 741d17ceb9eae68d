"""Two-bit chunks are lossless for every element type and length, are taken for many small changes, merge, and refuse damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.codec import Method, PlaneReader, encode_tensor, pack_differences, unpack_values
from services.common.weights.snapshot import Bits, element_type
from tests.unit.common.weights.test_codec import apply, random_bits, seeds, stepped, weight_bits

DTYPES = ["bfloat16", "float16", "float32", "int32", "int64", "uint8"]
LONG = 200_000  # elements; short chunks are never two-bit
METHOD_AT = 5  # byte of the first record's method


def moved(rng: np.random.Generator, old: Bits, share: float, farthest: int) -> Bits:
    """Some elements moved by up to ``farthest``, wrapping around."""
    steps = rng.integers(-farthest, farthest + 1, len(old))
    return old + np.where(rng.random(len(old)) < share, steps, 0).astype(old.dtype)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 5000), st.floats(0, 1), st.sampled_from([1, 2, 3, 100]), seeds)
def test_unpacking_inverts_packing(dtype: str, size: int, share: float, farthest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, size, dtype)
    new = moved(rng, old, share, farthest)
    body = pack_differences(old, new)
    if body is None:
        outside = (new - old + old.dtype.type(2)) > 3
        # Runs are looked at in turn, and the first ones may have more such differences than the chunk.
        assert outside.mean() > 0.25 or size < 2000
        return
    reader = PlaneReader(memoryview(b"".join(body)))
    np.testing.assert_array_equal(unpack_values(reader, old), new)
    assert reader.at_end


@pytest.mark.parametrize(
    ("share", "farthest", "method"),
    [(0.15, 1, Method.SPARSE), (0.3, 1, Method.TWO_BIT), (0.6, 2, Method.TWO_BIT), (0.9, 30, Method.DENSE)],
)
def test_many_small_changes_are_two_bit(share: float, farthest: int, method: Method) -> None:
    rng = np.random.default_rng(0)
    old = weight_bits(rng, LONG, "bfloat16")
    new = moved(rng, old, share, farthest)
    data = encode_tensor(old, new, "bfloat16")
    assert data[METHOD_AT] == method
    np.testing.assert_array_equal(apply(old, data, "bfloat16"), new)


def test_seventeen_percent_of_small_steps_take_few_more_bytes_than_their_entropy() -> None:
    rng = np.random.default_rng(2)
    old = weight_bits(rng, 1 << 20, "bfloat16")
    data = encode_tensor(old, stepped(rng, old, 0.17), "bfloat16")
    assert data[METHOD_AT] == Method.TWO_BIT
    entropy = -(0.83 * np.log2(0.83) + 0.17 * np.log2(0.17 / 2)) * len(old)
    assert 8 * len(data) < 1.05 * entropy


@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_damage_is_refused_or_gives_values_of_the_right_size(drawn: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, 3001, "bfloat16")
    body = pack_differences(old, moved(rng, old, 0.3, 3))
    assert body is not None
    data = bytearray(b"".join(body))
    for _ in range(drawn.draw(st.integers(1, 4))):
        data[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    try:
        values = unpack_values(PlaneReader(memoryview(bytes(data))), old)
    except CorruptDataError:
        return
    assert values.shape == old.shape and values.dtype == element_type("bfloat16").bits_dtype
