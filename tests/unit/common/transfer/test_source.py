"""Readers of memory end their lease once; sources are found by the names of their payloads."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import NotFoundError
from services.common.transfer.servicer import source_of


def test_a_source_is_found_by_the_policy_that_its_payloads_begin_with() -> None:
    sources: dict[str, Any] = {"a": "A", "a:b": "AB"}
    assert source_of("a:1:full:x", sources) == "A"
    assert source_of("a:b:1:full:x", sources) == "AB"
    with pytest.raises(NotFoundError):
        source_of("c:1", sources)
