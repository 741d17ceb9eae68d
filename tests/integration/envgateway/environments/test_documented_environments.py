"""The environments in docs/environments.md work: the test writes the files, names them as in the recipe, and plays."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from services.common.config.envgateway import EnvGatewayConfig
from services.envgateway.envs.base import EnvironmentContext
from services.envgateway.envs.episodes import EnvironmentRegistry, EpisodeManager
from services.envgateway.tools.registry import ToolBox
from tests.documented import blocks
from tests.integration.envgateway.environments.serving import Client, NoRewards, serving

PAGE = "environments.md"


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    for name, text in zip(("guess", "walk"), blocks(PAGE, "python"), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvGatewayConfig(**yaml.safe_load(blocks(PAGE, "yaml")[0])["envgateway"])
    known = EnvironmentRegistry(config.environments, EnvironmentContext(NoRewards(), ToolBox([])))  # type: ignore[arg-type]
    async with serving(EpisodeManager(known, max_episodes=8, lease_s=60), known) as playing:
        yield playing
    for name in ("guess", "walk"):
        sys.modules.pop(name, None)


async def test_the_documented_environment_is_played_by_halving(client: Client) -> None:
    start = await client.create("guess", {"most": 500}, seed=11)
    assert start.observation == "Guess a number from 1 to 500."
    low, high, turn = 1, 500, 0
    while True:
        turn, guess = turn + 1, (low + high) // 2
        answer = await client.step(start.episode_id, turn, str(guess))
        if answer.done:
            break
        low, high = (guess + 1, high) if "too low" in answer.observation else (low, guess - 1)
    assert (answer.reward, answer.metrics["guesses"]) == (1.0, turn)


async def test_the_documented_gymnasium_class_is_walked_to_its_end(client: Client) -> None:
    start = await client.create("walk", {"length": 2})
    assert list(start.admissible_actions) == ["left", "right"]
    await client.step(start.episode_id, 1, "right")
    end = await client.step(start.episode_id, 2, "right")
    assert (end.observation, end.reward, end.done) == ("You are at 2 of 2.", 1.0, True)


def test_the_documented_sections_are_valid_and_the_files_short(tmp_path: Path) -> None:
    sections = [yaml.safe_load(block)["envgateway"] for block in blocks(PAGE, "yaml")]
    assert len([EnvGatewayConfig(**section) for section in sections]) == 6
    assert all(len(block.splitlines()) <= 30 for block in blocks(PAGE, "python"))
