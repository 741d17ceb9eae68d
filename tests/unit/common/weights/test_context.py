"""The small form: every way of coding a class is lossless, and hostile heads cost no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.classes import ClassIndex, choose_bounds, exponents_of
from services.common.weights.codec import CHUNK_ELEMENTS, decode_tensor, encode_tensor
from services.common.weights.dtypes import Bits, element_type
from services.common.weights.manifest import Profile
from services.common.weights.planes import pack_varint
from tests.unit.common.weights.test_codec import DTYPES, apply, dtypes, random_bits, seeds, weight_bits


def small_bits(old: Bits, new: Bits) -> float:
    data = encode_tensor(old, new, "bfloat16", Profile.SMALL)
    assert np.array_equal(apply(old, data, "bfloat16"), new)
    return 8 * len(data) / int((old != new).sum())


@settings(max_examples=60, deadline=None)
@given(dtypes, st.integers(1, 4000), st.lists(st.integers(1, 255), max_size=8, unique=True).map(sorted), seeds)
def test_ranks_and_positions_in_a_class_are_inverse(dtype: str, size: int, bounds: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, size, dtype)
    exponents = exponents_of(old, dtype)
    index = ClassIndex(exponents, bounds)
    chosen = np.flatnonzero(rng.random(size) < 0.3)
    total = 0
    for number, members in enumerate(index.split(chosen)):
        lower, upper = [0, *bounds][number], [*bounds, 256][number]
        everyone = np.flatnonzero((exponents >= lower) & (exponents < upper))
        mine = chosen[members]
        ranks = index.ranks(number, mine)
        assert index.num_members(number) == len(everyone)
        assert np.array_equal(everyone[ranks], mine)
        assert np.array_equal(index.positions(number, ranks), mine)
        total += len(mine)
    assert total == len(chosen), "every element is in one class"


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_leave_the_sign_out(dtype: str) -> None:
    one = {"bfloat16": 0x3F80, "float16": 0x3C00, "float32": 0x3F800000}[dtype]
    top = {"bfloat16": 15, "float16": 15, "float32": 31}[dtype]
    bits = np.array([one, one | 1 << top, 0, 1 << top], dtype=element_type(dtype).bits_dtype)
    bias = 15 if dtype == "float16" else 127
    assert exponents_of(bits, dtype).tolist() == [bias, bias, 0, 0]


def test_classes_are_told_apart_only_where_it_pays() -> None:
    rng = np.random.default_rng(0)
    exponents = exponents_of(weight_bits(rng, 200_000, "bfloat16"), "bfloat16")
    anywhere = np.flatnonzero(rng.random(len(exponents)) < 0.01)
    assert choose_bounds(exponents, anywhere, 1.0) == []
    often = np.where(exponents < 118, 0.1, 0.001)
    assert choose_bounds(exponents, np.flatnonzero(rng.random(len(exponents)) < often), 1.0) == [118]


def test_changes_in_clumps_take_no_more_than_in_the_fast_profile() -> None:
    rng = np.random.default_rng(1)
    old = weight_bits(rng, 1 << 19, "bfloat16").reshape(-1, 1024)
    new = old.copy()
    rows = rng.choice(len(old), 30, replace=False)  # an embedding of which few tokens were seen
    new[rows] += (rng.random((30, 1024)) < 0.2).astype(np.uint16)
    fast = 8 * len(encode_tensor(old.ravel(), new.ravel(), "bfloat16")) / int((old != new).sum())
    assert small_bits(old.ravel(), new.ravel()) <= fast


def test_steps_of_all_scales_survive() -> None:
    rng = np.random.default_rng(2)
    for dtype in DTYPES:
        old = weight_bits(rng, 50_000, dtype)
        new = old.copy()
        chosen = np.flatnonzero(rng.random(len(old)) < 0.05)
        top = old.dtype.itemsize * 8
        new[chosen] += (1 << rng.integers(0, top, len(chosen), dtype=np.uint64)).astype(old.dtype)
        data = encode_tensor(old, new, dtype, Profile.SMALL)
        assert np.array_equal(apply(old, data, dtype), new)


def test_a_tensor_of_a_hundred_thousand_elements_takes_few_bits_per_change_too() -> None:
    rng = np.random.default_rng(3)
    master = rng.standard_normal(130_000, dtype=np.float32) * np.float32(0.02)
    moved = master + rng.standard_normal(len(master), dtype=np.float32) * np.float32(2.5e-7)
    old, new = (
        (v.view(np.uint32) + 0x7FFF + ((v.view(np.uint32) >> 16) & 1) >> 16).astype(np.uint16) for v in (master, moved)
    )
    assert 0.008 < (old != new).mean() < 0.012
    assert small_bits(old, new) <= 8.5


_RECORD = b"\0\0\0\0\x04\0\0\0\x01\0\0\0"  # chunk 0, context, one change
_FULL = CHUNK_ELEMENTS * 16
HEADS = {
    "every element of a class changed": b"\x01" + pack_varint(_FULL) + bytes([0, 0, 0, 0]),
    "more changes than there is room for": b"\x01" + pack_varint(2**34) + bytes([5, 0, 0, 0]),
    "far too wide gaps": b"\x01" + pack_varint(1 << 20) + bytes([31, 0, 0, 0]),
    "far too wide gaps between large steps": b"\x01"
    + pack_varint(1 << 20)
    + bytes([3])
    + pack_varint(1 << 20)
    + bytes([31, 0]),
    "unknown parameter": b"\x01" + pack_varint(100) + bytes([99, 0, 0, 0]),
    "more large steps than steps": b"\x01" + pack_varint(100) + bytes([5, 101, 0, 0]),
    "no class": b"\x00",
    "more classes than are read": b"\xff" + bytes(400),
    "bounds that do not ascend": b"\x03\x07\x07" + bytes(3),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_heads_that_promise_too_much_are_refused_before_anything_is_allocated(head: bytes) -> None:
    old = np.zeros(_FULL, dtype=np.uint16)
    # Planes that are all zero take five bytes, whatever they claim to hold.
    planes = b"".join(b"\0" + size.to_bytes(4, "little") for size in (1 << 21, 1 << 24, 1 << 24))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            list(decode_tensor(old, b"\x02" + head + planes + _RECORD, "bfloat16"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([1, 2]))
def test_any_bytes_are_refused_or_decode_within_the_tensor(noise: bytes, form: int) -> None:
    old = weight_bits(np.random.default_rng(0), 3000, "bfloat16")
    try:
        for change in decode_tensor(old, bytes([form]) + noise, "bfloat16"):
            change.write_to(old.copy())
    except CorruptDataError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.data(), seeds)
def test_a_damaged_head_is_refused_or_decodes_within_the_tensor(drawn: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = weight_bits(rng, 30_000, "bfloat16")
    new = old.copy()
    new[rng.random(len(old)) < np.where(exponents_of(old, "bfloat16") < 118, 0.2, 0.01)] ^= 3
    data = bytearray(encode_tensor(old, new, "bfloat16", Profile.SMALL))
    for _ in range(drawn.draw(st.integers(1, 3))):
        data[drawn.draw(st.integers(1, 60))] = drawn.draw(st.integers(0, 255))
    try:
        for change in decode_tensor(old, bytes(data), "bfloat16"):
            change.write_to(old.copy())
            assert change.positions is None or np.all(np.diff(change.positions) > 0)
    except CorruptDataError:
        pass
