"""Rings for tests, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.orchestrator.world import World


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    made: list[World] = []

    def make(**batch: Any) -> World:
        made.append(World(tmp_path / str(len(made)), **batch))
        return made[-1]

    yield make
    for world in made:
        await world.close()
