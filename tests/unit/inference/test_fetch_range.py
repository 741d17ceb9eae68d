"""A range that is being received takes exactly the bytes that are due, whoever brings them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.manifest import ALIGNMENT
from services.inference.weights.fetch_links import LinkSpeeds
from services.inference.weights.fetch_range import ByteRange, receive_buffer


@given(st.binary(min_size=1, max_size=200), st.integers(0, 100), st.lists(st.integers(1, 50), max_size=20))
def test_pieces_of_any_size_make_the_range(data: bytes, start: int, sizes: list[int]) -> None:
    room = bytearray(len(data))
    seen: list[int] = []
    wanted = ByteRange(start, start + len(data), memoryview(room), seen.append)
    for size in [*sizes, len(data)]:
        if wanted.is_complete:
            break
        begin = wanted.offset - start
        wanted.put(wanted.offset, data[begin : begin + size])
    assert wanted.is_complete and room == data
    assert seen == sorted(seen) and seen[-1] == start + len(data)


@pytest.mark.parametrize(("offset", "size"), [(9, 1), (11, 1), (10, 6), (0, 0)])
def test_other_bytes_than_those_due_are_refused_and_change_nothing(offset: int, size: int) -> None:
    room = bytearray(5)
    wanted = ByteRange(10, 15, memoryview(room))
    with pytest.raises(CorruptDataError):
        wanted.put(offset, b"x" * size)
    assert wanted.offset == 10 and room == bytes(5)


def test_room_of_another_size_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="4 bytes of room"):
        ByteRange(0, 5, memoryview(bytearray(4)))


@pytest.mark.parametrize("size", [0, 1, 63, 5_000_000])
def test_a_receive_buffer_is_aligned_and_writable(size: int) -> None:
    buffer = receive_buffer(size)
    array = np.frombuffer(buffer, dtype=np.uint8)
    assert len(buffer) == size and (not size or array.ctypes.data % ALIGNMENT == 0)
    assert array.flags.writeable


def test_the_speed_of_a_link_follows_its_last_transfers_and_ignores_small_ones() -> None:
    links = LinkSpeeds()
    assert links.bytes_per_s("a") == 0
    links.record("a", 100, 1.0)
    assert links.bytes_per_s("a") == 0
    links.record("a", 10_000_000, 1.0)
    assert links.bytes_per_s("a") == 10_000_000
    for _ in range(20):
        links.record("a", 1_000_000, 1.0)
    assert 1_000_000 < links.bytes_per_s("a") < 1_100_000
    assert links.bytes_per_s("b") == 0
