"""The settings and rows that docs/environments.md shows for text games and AgentBench servers are valid."""

from __future__ import annotations

import json

from extras.worlds.textworld import TextworldSettings
from services.envgateway.envs.base import settings_of
from tests.documented import blocks

PAGE = "environments.md"


def test_the_documented_rows_are_valid() -> None:
    rows = [json.loads(line) for block in blocks(PAGE, "json") for line in block.splitlines()]
    assert [settings_of(row, TextworldSettings).make.kind for row in rows] == ["cooking", "custom"]
