"""How TextWorld's games are told and scored. The engine is played by a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extras.worlds.settings import GamesConfig
from extras.worlds.textworld import TextworldEpisode, TextworldSettings, game_of, list_games, opening, tidy
from services.common.errors import ConfigError, InvalidRequestError
from services.envgateway.envs.base import settings_of
from tests.documented import blocks


class ScriptedGame:
    """In place of pool and game."""

    def __init__(self, max_score: float, answers: list[dict[str, Any]]) -> None:
        self._max_score = max_score
        self._answers = answers

    async def open(self, settings: dict[str, Any]) -> tuple[ScriptedGame, dict[str, Any]]:
        return self, {"feedback": "A room.", "admissible": [], "objective": "Win.", "max_score": self._max_score}

    async def step(self, command: str) -> dict[str, Any]:
        return {"feedback": "", "admissible": [], "score": 0.0, "won": False, "done": False, **self._answers.pop(0)}


async def play(game: ScriptedGame, folder: Path, max_turns: int, replies: list[str]) -> list[Any]:
    (folder / "a.z8").touch()
    episode = TextworldEpisode(game, GamesConfig(games=folder, max_turns=max_turns))  # type: ignore[arg-type]
    await episode.reset({"index": 0}, 0)
    return [await episode.step(reply) for reply in replies]


async def test_rewards_are_shares_of_the_score(tmp_path: Path) -> None:
    game = ScriptedGame(4.0, [{"score": 1.0}, {"score": 1.0}, {"score": 4.0, "done": True, "won": True}])
    results = await play(game, tmp_path, 10, ["ACTION: a", "ACTION: b", "ACTION: c"])
    assert [result.reward for result in results] == [0.25, 0.0, 0.75]
    assert (results[-1].done, results[-1].status) == (True, "completed")


async def test_a_game_without_a_score_pays_for_the_win(tmp_path: Path) -> None:
    results = await play(ScriptedGame(0.0, [{}, {"won": True, "done": True}]), tmp_path, 10, ["ACTION: a"] * 2)
    assert [result.reward for result in results] == [0.0, 1.0]


def test_the_games_text_is_shown_without_drawing_and_prompt() -> None:
    feedback = (
        "\n\n   ____  ____\n  |  \\$$/ >$|\n\nYou win by dancing.\n\n\n\n-= Hall =-\nA hall.\n\n\n>      -= Hall =-0/1"
    )
    assert tidy(feedback) == "You win by dancing.\n\n-= Hall =-\nA hall."
    told = opening(feedback, "You win by dancing.", ["dance"])
    assert told.count("You win by dancing.") == 1 and told.endswith("A hall. AVAILABLE ACTIONS: dance\n")
    assert "Find gold.\nA hall." in opening("A hall.", "Find gold.", [])


def test_games_of_a_folder_count_in_their_sorted_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no game file"):
        list_games(tmp_path)
    for name in ("b.z8", "a.z5", "a.json", "c.ulx"):
        (tmp_path / name).touch()
    assert list_games(tmp_path) == ["a.z5", "b.z8"]
    assert game_of({"index": 1}, tmp_path) == tmp_path / "b.z8"
    assert game_of({"game": "a.z5"}, tmp_path) == tmp_path / "a.z5"
    for task in ({"game": "../b.z8"}, {"game": ["b.z8"]}):
        with pytest.raises(InvalidRequestError, match="there is no game"):
            game_of(task, tmp_path)
    for task in ({"index": -1}, {"index": 2}):
        with pytest.raises(InvalidRequestError, match="holds 2 games, and indices count from 0"):
            game_of(task, tmp_path)
    for task in ({}, {"index": "1"}, {"index": True}):
        with pytest.raises(InvalidRequestError, match="needs `index`"):
            game_of(task, tmp_path)


PAGE = "environments.md"


def test_the_documented_rows_are_valid() -> None:
    rows = [json.loads(line) for block in blocks(PAGE, "json") for line in block.splitlines()]
    assert [settings_of(row, TextworldSettings).make.kind for row in rows] == ["cooking", "custom"]
