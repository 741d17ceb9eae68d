"""The fast ways of the codec give what the plain ones give: positions, prefix sums, scattered writes, and the method chosen."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.weights import codec
from services.common.weights.codec import (
    PlaneReader,
    decode_tensor,
    encode_tensor,
    pack_columns,
    pack_positions,
    pack_steps,
    scatter,
    unpack_positions,
)
from services.common.weights.snapshot import zigzagged_steps

SEEDS = st.integers(0, 1 << 30)


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_positions_and_scattered_values_do_not_depend_on_torch(
    has_torch: bool, dtype: type[np.unsignedinteger], monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_torch:
        importlib.import_module("torch")
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    rng = np.random.default_rng(1)
    positions = np.flatnonzero(rng.random(80_000) < 0.2)
    read = unpack_positions(PlaneReader(memoryview(pack_positions(positions))), len(positions), 80_000)
    np.testing.assert_array_equal(read, positions)
    target, values = (rng.integers(0, 200, size).astype(dtype) for size in (80_000, len(positions)))
    expected = target.copy()
    expected[positions] = values
    scatter(target, positions, values)
    np.testing.assert_array_equal(target, expected)
    values.flags.writeable = False  # as a payload in a mapped file is
    scatter(target, positions, values)
    np.testing.assert_array_equal(target, expected)


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
