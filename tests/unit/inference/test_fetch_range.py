"""A range accepts exactly its missing bytes, from any transport."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from services.common.errors import CorruptDataError
from services.common.weights.snapshot import ALIGNMENT, Encoding, Manifest, Payload
from services.inference.weights.fetch import ByteRange, Incoming, receive_buffer


@pytest.mark.parametrize(("offset", "size"), [(9, 1), (11, 1), (10, 6), (0, 0)])
def test_other_bytes_than_those_due_are_refused_and_change_nothing(offset: int, size: int) -> None:
    room = bytearray(5)
    wanted = ByteRange(10, 15, memoryview(room))
    with pytest.raises(CorruptDataError):
        wanted.put(offset, b"x" * size)
    assert wanted.offset == 10 and room == bytes(5)


def test_a_complete_payload_is_freed_without_a_garbage_collection() -> None:
    manifest = Manifest.of(run_id="r", policy="p", version=1, tensors=[])
    payload = Payload(payload_id="p:1", encoding=Encoding.FULL, size_bytes=10, target=manifest)
    incoming = Incoming(payload, memoryview(bytearray(10)))
    for start, end in ((0, 4), (4, 10)):
        incoming.shard(start, end).put(start, bytes(end - start))
    freed = weakref.ref(incoming)
    gc.disable()
    try:
        del incoming
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [0, 1, 63, 5_000_000])
def test_a_receive_buffer_is_aligned_and_writable(size: int) -> None:
    buffer = receive_buffer(size)
    array = np.frombuffer(buffer, dtype=np.uint8)
    assert len(buffer) == size and (not size or array.ctypes.data % ALIGNMENT == 0)
    assert array.flags.writeable
