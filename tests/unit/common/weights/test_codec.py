"""The delta codec is lossless for every bit pattern, and refuses bytes that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.codec import CHUNK_ELEMENTS, decode_tensor, encode_tensor
from services.common.weights.dtypes import Bits, element_type

DTYPES = ["bfloat16", "float16", "float32"]


def apply(old: Bits, data: bytes, dtype: str) -> Bits:
    result = old.copy()
    for change in decode_tensor(old, data, dtype):
        change.write_to(result)
    return result


def random_bits(rng: np.random.Generator, size: int, dtype: str) -> Bits:
    kind = element_type(dtype).bits_dtype
    return rng.integers(0, np.iinfo(kind).max, size=size, dtype=kind, endpoint=True)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.7, 1.0]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_is_decoded_is_what_was_encoded(dtype: str, size: int, share: float, small: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, size, dtype)
    new = old.copy()
    chosen = rng.random(size) < share
    if small:
        new[chosen] += np.asarray(rng.choice([1, -1], size=int(chosen.sum()))).astype(new.dtype)
    else:
        new[chosen] = random_bits(rng, int(chosen.sum()), dtype)
    data = encode_tensor(old, new, dtype)
    assert np.array_equal(apply(old, data, dtype), new)
    if np.array_equal(old, new):
        assert data == b""


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_payloads_zeros_infinities_and_denormals_survive(dtype: str) -> None:
    kind = element_type(dtype).bits_dtype
    top = np.iinfo(kind).max
    sign = top // 2 + 1
    special = np.array([0, sign, 1, sign + 1, top, top - 1, top // 2, top // 2 - 1], dtype=kind)
    old, new = np.meshgrid(special, special)
    old, new = old.ravel().copy(), new.ravel().copy()
    assert np.array_equal(apply(old, encode_tensor(old, new, dtype), dtype), new)


def test_changes_at_chunk_borders_survive() -> None:
    old = np.zeros(2 * CHUNK_ELEMENTS + 3, dtype=np.uint16)
    new = old.copy()
    new[[0, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS, len(new) - 1]] = 7
    data = encode_tensor(old, new, "bfloat16")
    assert len(data) < 200
    assert np.array_equal(apply(old, data, "bfloat16"), new)


def test_one_percent_of_small_steps_takes_few_bits_per_change() -> None:
    rng = np.random.default_rng(0)
    old = random_bits(rng, 1 << 20, "bfloat16")
    new = old.copy()
    chosen = np.flatnonzero(rng.random(len(old)) < 0.01)
    new[chosen] += np.where(rng.random(len(chosen)) < 0.5, 1, -1).astype(np.uint16)
    data = encode_tensor(old, new, "bfloat16")
    assert 8 * len(data) / len(chosen) < 12


def test_torn_and_foreign_bytes_are_refused() -> None:
    old = np.zeros(1000, dtype=np.uint16)
    new = old.copy()
    new[::50] = 3
    data = encode_tensor(old, new, "bfloat16")
    for broken in (data[:-1], b"\x63" + data[1:], data + b"\x00"):
        with pytest.raises(CorruptDataError):
            apply(old, broken, "bfloat16")
