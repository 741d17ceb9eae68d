"""Fixtures: worlds for tests, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.orchestrator.journal import journal
from tests.unit.orchestrator.world import World, worlds_in


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits follow each other at once: these tests wait for hundreds of single records."""
    monkeypatch.setattr(journal, "LINGER_S", 0.0)


@pytest.fixture
async def worlds(tmp_path: Path, no_linger: None) -> AsyncIterator[Callable[..., World]]:
    async with worlds_in(tmp_path) as make:
        yield make
