"""Fixtures: worlds for tests, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.journal import journal
from services.orchestrator.journal.journal import Journal
from tests.unit.orchestrator.world import World, worlds_in


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits follow each other at once: these tests wait for hundreds of single records."""
    monkeypatch.setattr(journal, "LINGER_S", 0.0)


@pytest.fixture
async def worlds(tmp_path: Path, no_linger: None) -> AsyncIterator[Callable[..., World]]:
    async with worlds_in(tmp_path) as make:
        yield make


@pytest.fixture
async def open_journal(tmp_path: Path) -> AsyncIterator[Callable[..., Journal]]:
    """Starts journals in one directory, and closes them."""
    made: list[Journal] = []

    def open_it(**settings: Any) -> Journal:
        made.append(Journal(tmp_path, **settings))
        made[-1].start()
        return made[-1]

    yield open_it
    for opened in made:
        await opened.close()
