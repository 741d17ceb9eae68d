"""Rings for tests, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.journal import writer
from tests.unit.orchestrator.world import World


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits follow each other at once: these tests wait for hundreds of single records."""
    monkeypatch.setattr(writer, "LINGER_S", 0.0)


@pytest.fixture
async def worlds(tmp_path: Path, no_linger: None) -> AsyncIterator[Callable[..., World]]:
    made: list[World] = []

    def make(**batch: Any) -> World:
        made.append(World(tmp_path / str(len(made)), **batch))
        return made[-1]

    yield make
    for world in made:
        await world.close()
