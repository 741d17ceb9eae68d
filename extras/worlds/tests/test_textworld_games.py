"""TextWorld's real engine over real gRPC, with games made on the fly."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from extras.worlds.settings import EnginePoolConfig, GamesConfig
from extras.worlds.textworld import TextworldWorld
from services.common.errors import InvalidRequestError
from tests.integration.envgateway.environments.serving import Client, served_world

pytestmark = pytest.mark.needs("textworld")

COOKING = {"kind": "cooking", "recipe": 1, "take": 1, "open": True, "cook": True, "split": "train"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one cooking game, in a cache of its own; made once for the episodes that ask for it at once."""
    folder = tmp_path_factory.mktemp("textworld")

    async def make() -> None:
        task, config = (
            {"index": 3, "environment": {"make": COOKING}},
            GamesConfig(engine=EnginePoolConfig(num_workers=1)),
        )
        async with served_world("textworld", TextworldWorld(config)) as client:
            first, second = await asyncio.gather(*(client.create("textworld", task, seed=seed) for seed in range(2)))
        assert first.observation == second.observation and first.admissible_actions

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(folder))
        asyncio.run(make())
    (game,) = folder.glob("*/*.z8")
    return game


def recipe_of(cache: Path) -> list[str]:
    """The winning commands that the one made game carries."""
    (about,) = cache.glob("*.json")
    return list(json.loads(about.read_text())["metadata"]["walkthrough"])


async def play(client: Client, task: dict[str, object], commands: list[str]) -> tuple[str, float, bool]:
    episode = await client.create("textworld", task)
    total, done = 0.0, False
    for turn, command in enumerate(commands, start=1):
        result = await client.step(episode.episode_id, turn, f"ACTION: {command}")
        total, done = total + result.reward, result.done
    await client.close(episode.episode_id)
    return episode.observation, total, done


async def test_games_are_won_by_their_own_recipe_several_at_once_in_one_process(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(made.parent.parent))
    task = {"index": 3, "environment": {"make": COOKING}}
    config = GamesConfig(engine=EnginePoolConfig(num_workers=1))
    async with served_world("textworld", TextworldWorld(config)) as client:
        plays = await asyncio.gather(*(play(client, task, recipe_of(made.parent)) for _ in range(3)))
    for observation, total, done in plays:
        assert "cookbook" in observation and "open fridge" in observation
        assert (total, done) == (pytest.approx(1.0), True)


async def test_a_folder_of_games_is_played_by_index_or_name(made: Path, tmp_path: Path) -> None:
    for file in made.parent.iterdir():
        shutil.copy(file, tmp_path)
    async with served_world("textworld", TextworldWorld(GamesConfig(games=tmp_path))) as client:
        by_index = await client.create("textworld", {"index": 0})
        by_name = await client.create("textworld", {"game": made.name})
        assert by_index.observation == by_name.observation
        with pytest.raises(InvalidRequestError, match="holds 1 games"):
            await client.create("textworld", {"index": 1})
    (tmp_path / made.name).with_suffix(".json").unlink()
    async with served_world("textworld", TextworldWorld(GamesConfig(games=tmp_path))) as client:
        bare = await client.create("textworld", {"index": 0})
        assert not bare.admissible_actions and "AVAILABLE" not in bare.observation
        result = await client.step(bare.episode_id, 1, "ACTION: open fridge")
        assert "You open the fridge" in result.observation


async def test_a_game_that_cannot_be_made_or_found_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with served_world("textworld", TextworldWorld(GamesConfig())) as client:
        for environment in ({"make": {"kind": "racing"}}, {"make": {**COOKING, "take": 4}}):
            with pytest.raises(InvalidRequestError):
                await client.create("textworld", {"index": 1, "environment": environment})
        with pytest.raises(InvalidRequestError, match="cannot be made"):
            await client.create("textworld", {"index": 2**40})
        with pytest.raises(InvalidRequestError, match="index"):
            await client.create("textworld", {"question": "2 + 2"})
    assert list(tmp_path.glob("*/*")) == []
