"""Readers of memory end their lease once; sources are found by the names of their payloads."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import NotFoundError
from services.common.net.hosts import host_identity
from services.common.transfer.bulk import MemoryReader
from services.common.transfer.servicer import source_of


async def test_a_reader_of_memory_gives_the_requested_range_and_ends_its_lease_once() -> None:
    ended: list[bool] = []
    reader = MemoryReader(memoryview(b"0123456789"), lambda: ended.append(True))
    assert reader.size_bytes == 10
    assert await reader.read(3, 4) == b"3456"
    assert await reader.read(8, 100) == b"89"
    reader.close()
    reader.close()
    assert ended == [True]


def test_a_source_is_found_by_the_policy_that_its_payloads_begin_with() -> None:
    sources: dict[str, Any] = {"a": "A", "a:b": "AB"}
    assert source_of("a:1:full:x", sources) == "A"
    assert source_of("a:b:1:full:x", sources) == "AB"
    with pytest.raises(NotFoundError):
        source_of("c:1", sources)


def test_a_host_knows_itself() -> None:
    assert host_identity() == host_identity() != ""
