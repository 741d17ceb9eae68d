"""The delta codec is lossless for every bit pattern, and refuses bytes that make no sense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights import codec
from services.common.weights.codec import (
    CHUNK_ELEMENTS,
    decode_tensor,
    encode_tensor,
    pack_columns,
    pack_positions,
    pack_steps,
)
from services.common.weights.snapshot import Bits, element_type, zigzagged_steps

DTYPES = ["bfloat16", "float16", "float32"]

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.7, 1.0])


def apply(old: Bits, data: bytes, dtype: str) -> Bits:
    result = old.copy()
    for change in decode_tensor(old, data, dtype):
        change.write_to(result)
    return result


def random_bits(rng: np.random.Generator, size: int, dtype: str) -> Bits:
    kind = element_type(dtype).bits_dtype
    return rng.integers(0, np.iinfo(kind).max, size=size, dtype=kind, endpoint=True)


def weight_bits(rng: np.random.Generator, size: int, dtype: str) -> Bits:
    """Values as weights have them, of many magnitudes."""
    values = (rng.standard_normal(size) * 0.02).astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32) if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def stepped(rng: np.random.Generator, old: Bits, share: float) -> Bits:
    """Some elements moved to a neighbouring value."""
    new = old.copy()
    chosen = rng.random(len(old)) < share
    new[chosen] += np.asarray(rng.choice([1, -1], size=int(chosen.sum()))).astype(new.dtype)
    return new


@settings(max_examples=100, deadline=None)
@given(dtypes, st.integers(0, 20_000), shares, st.booleans(), st.booleans(), seeds)
def test_decoding_inverts_encoding(
    dtype: str, size: int, share: float, small_steps: bool, like_weights: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = (weight_bits if like_weights else random_bits)(rng, size, dtype)
    new = stepped(rng, old, share)
    if not small_steps:
        moved = new != old
        new[moved] = random_bits(rng, int(moved.sum()), dtype)
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
    # Among many unchanged elements, so that the sparse form is taken.
    old, new = (np.concatenate([a.ravel(), np.full(40_000, 99, dtype=kind)]) for a in (old, new))
    order = np.random.default_rng(1).permutation(len(old))
    old, new = np.tile(old[order], 20), np.tile(new[order], 20)
    assert np.array_equal(apply(old, encode_tensor(old, new, dtype), dtype), new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_of_chunk_may_stand_in_one_tensor(dtype: str) -> None:
    rng = np.random.default_rng(7)
    old = weight_bits(rng, 6 * CHUNK_ELEMENTS + 777, dtype)
    new = old.copy()
    for chunk, share in ((0, 0.01), (2, 0.004), (3, 0.3), (5, 0.0001), (6, 0.5)):
        part = slice(chunk * CHUNK_ELEMENTS, (chunk + 1) * CHUNK_ELEMENTS)
        new[part] = stepped(rng, old[part], share)
    part = slice(4 * CHUNK_ELEMENTS, 5 * CHUNK_ELEMENTS)
    new[part] = random_bits(rng, CHUNK_ELEMENTS, dtype)
    data = encode_tensor(old, new, dtype)
    assert np.array_equal(apply(old, data, dtype), new)
    starts = [change.start // CHUNK_ELEMENTS for change in decode_tensor(old, data, dtype)]
    assert starts == [0, 2, 3, 4, 5, 6], "chunk 1 did not change and takes no space"


def test_changes_at_chunk_borders_survive() -> None:
    old = np.zeros(2 * CHUNK_ELEMENTS + 3, dtype=np.uint16)
    new = old.copy()
    new[[0, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS, len(new) - 1]] = 7
    data = encode_tensor(old, new, "bfloat16")
    assert len(data) < 250
    assert np.array_equal(apply(old, data, "bfloat16"), new)


def test_one_percent_of_small_steps_takes_few_bits_per_change() -> None:
    rng = np.random.default_rng(0)
    master = rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
    moved = master + rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(2.5e-7)
    old, new = (
        (v.view(np.uint32) + 0x7FFF + ((v.view(np.uint32) >> 16) & 1) >> 16).astype(np.uint16) for v in (master, moved)
    )
    num_changes = int((old != new).sum())
    assert 0.008 < num_changes / len(old) < 0.011
    assert 8 * len(encode_tensor(old, new, "bfloat16")) / num_changes <= 10.8


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[:-1], None),
        (lambda data: data[: len(data) // 2], None),
        (lambda data: data + b"\0", None),
        (lambda data: b"\x63" + data[1:], "delta format 99 is unknown here"),
        (lambda data: data[:5] + b"\5" + data[6:], "method 5, which is unknown here"),
    ],
)
def test_torn_and_foreign_bytes_are_refused(spoil: Callable[[bytes], bytes], said: str | None) -> None:
    rng = np.random.default_rng(5)
    old = weight_bits(rng, 60_000, "bfloat16")
    data = encode_tensor(old, stepped(rng, old, 0.05), "bfloat16")
    with pytest.raises(CorruptDataError, match=said):
        apply(old, spoil(data), "bfloat16")


@settings(max_examples=150, deadline=None)
@given(st.data(), seeds)
def test_damaged_bytes_are_refused_or_decode_to_something_of_the_right_size(drawn: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = weight_bits(rng, 30_000, "bfloat16")
    data = bytearray(encode_tensor(old, stepped(rng, old, 0.05), "bfloat16"))
    for _ in range(drawn.draw(st.integers(1, 4))):
        data[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    try:
        decoded = list(decode_tensor(old, bytes(data), "bfloat16"))
    except CorruptDataError:
        return
    for change in decoded:  # the digest of the whole tensor is what tells these apart
        assert change.start + (
            int(change.positions[-1]) + 1 if change.positions is not None else len(change.values)
        ) <= len(old)
        assert len(change.values) <= len(old)


def test_unequal_tensors_have_no_delta() -> None:
    with pytest.raises(ValueError, match="equal tensors"):
        encode_tensor(np.zeros(3, np.uint16), np.zeros(4, np.uint16), "bfloat16")


# --- the fast ways give what the plain ones give


SEEDS = st.integers(0, 1 << 30)


@settings(max_examples=40)
@given(st.sampled_from([0.02, 0.1, 0.17, 0.25, 0.35, 0.5, 0.8]), st.sampled_from([2, 5, 300, 1 << 16]), SEEDS)
def test_a_chunk_takes_the_smallest_of_the_three_forms(share: float, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, 10_000, dtype=np.uint16)
    moved = rng.random(len(old)) < share
    new = np.where(moved, old + rng.integers(1, most, len(old)).astype(np.uint16), old)
    data = encode_tensor(old, new, "bfloat16")
    positions = np.flatnonzero(old != new)
    if not len(positions):
        assert data == b""
        return
    forms = [[new.tobytes()], pack_columns(zigzagged_steps(old, new, is_float=True))]
    if len(positions) <= len(old) // 2:
        steps = zigzagged_steps(old[positions], new[positions], is_float=True)
        forms.append([pack_positions(positions), pack_steps(steps)])
    assert len(data) == 1 + codec._RECORD.size + min(sum(map(len, form)) for form in forms)
    target = old.copy()
    for change in decode_tensor(old, data, "bfloat16"):
        change.write_to(target)
    np.testing.assert_array_equal(target, new)
