"""How ALFWorld is spoken: replies, endings and the list of games. The engine is played by a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extras.worlds import alfworld
from extras.worlds.alfworld import AlfworldEpisode, GameList, bleu, choose, game_of, list_games
from extras.worlds.messages import offer, read_action
from extras.worlds.settings import AlfworldConfig
from services.common.errors import ConfigError, InvalidRequestError
from services.envgateway.envs.base import EpisodeLostError

GAME = "json_2.1.1/train/pick_heat_then_place_in_recep-Mug-None-Shelf-1/trial_1/game.tw-pddl"
LISTED = ["go to shelf 1", "look", "take mug 1 from shelf 1"]


class ScriptedEngine:
    """In place of pool and game: ``answers`` by command, and the received commands."""

    def __init__(self, answers: dict[str, dict[str, Any]] | None = None) -> None:
        self._answers = answers or {}
        self.opened: list[str] = []
        self.commands: list[str] = []
        self.closed = 0

    async def open(self, settings: dict[str, Any]) -> tuple[ScriptedEngine, dict[str, Any]]:
        self.opened.append(settings["path"])
        feedback = "-= Welcome =-\n\nYou are in a room.\n\nYour task is to: heat the mug."
        return self, {"feedback": feedback, "admissible": LISTED}

    async def step(self, command: str) -> dict[str, Any]:
        self.commands.append(command)
        answer = {"feedback": f"You {command}.", "admissible": LISTED, "won": False, "done": False}
        return answer | self._answers.get(command, {})

    def close(self) -> None:
        self.closed += 1


async def begin(engine: ScriptedEngine, max_turns: int = 50, **task: Any) -> tuple[AlfworldEpisode, Any]:
    episode = AlfworldEpisode(engine, Path("/data"), lambda: GameList([GAME], "a list"), max_turns)  # type: ignore[arg-type]
    return episode, await episode.reset({"index": 0, **task}, 0)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("ACTION: look", "look"),
        ("THOUGHT: hm.\n ACTION: Go To Shelf 1 \nACTION: look", "go to shelf 1"),
        ("ACTION:look\nand more", "look"),
        ("I say ACTION: look ACTION: up", "look action: up"),
        ("action: look", None),
        ("ACTION:", None),
        ("ACTION:  \nlook", None),
        ("", None),
    ],
)
def test_the_action_is_the_rest_of_the_first_line_that_announces_one(reply: str, action: str | None) -> None:
    assert read_action(reply) == action


def test_bleu_has_the_values_of_the_method_it_names() -> None:
    """Values of another implementation: nltk 3.10's sentence_bleu with its smoothing method 4."""
    assert bleu("move apple 1 to fridge 1", "put apple 1 in/on fridge 1") == pytest.approx(0.1374292659508281)
    assert bleu("go to armchair 1", "fly to the moon") == pytest.approx(0.061033220311973134)
    assert bleu("look", "go look") == pytest.approx(0.06754436142034706)
    assert bleu("go to shelf 1", "shelf") == pytest.approx(0.049787068367863944)


def test_an_action_that_is_not_listed_becomes_the_one_most_like_it() -> None:
    assert choose("look", LISTED) == "look"
    assert choose("grab mug 1 from the shelf 1", LISTED) == "take mug 1 from shelf 1"
    assert choose("jump", LISTED) == "jump"
    assert choose("dance", []) == "dance"
    assert choose("fly to the moon", ["go to armchair 1", "go to armchair 2"]) == "go to armchair 1"  # first of equals


async def test_the_opening_is_instruction_promise_example_of_the_type_and_task() -> None:
    _, first = await begin(ScriptedEngine())
    contents = [message["content"] for message in first.messages]
    assert [message["role"] for message in first.messages] == ["user", "assistant"] * (len(contents) // 2) + ["user"]
    assert contents[0] == alfworld.INSTRUCTION
    assert contents[2] == alfworld.EXAMPLE_LEAD + alfworld.EXAMPLES["pick_heat_then_place"][0]
    assert contents[-1] == (
        "Now your own task. You are in a room.\nYour task is to: heat the mug."
        " AVAILABLE ACTIONS: go to shelf 1\nlook\ntake mug 1 from shelf 1\n"
    )
    assert first.admissible_actions == LISTED
    assert all(content.strip() in first.text for content in (contents[0], *contents[2:]))


def test_every_example_is_a_conversation_in_the_form_that_the_instruction_asks_for() -> None:
    for kind, example in alfworld.EXAMPLES.items():
        assert len(example) % 2 == 0, kind
        assert all(read_action(reply) for reply in example[1::2]), kind
        assert "Your task is to: " in example[0]


async def test_a_won_game_is_worth_one_and_any_other_end_zero() -> None:
    engine = ScriptedEngine({"look": {"won": True, "done": True}, "go to shelf 1": {"done": True}})
    episode, _ = await begin(engine)
    result = await episode.step("THOUGHT: done\nACTION: LOOK")
    assert (result.reward, result.done, result.status) == (1.0, True, "completed")
    episode, _ = await begin(engine)
    result = await episode.step("ACTION: go to shelf 1")
    assert (result.reward, result.done, result.status) == (0.0, True, "completed")


async def test_a_reply_without_an_action_costs_a_turn_and_reaches_no_engine() -> None:
    engine = ScriptedEngine()
    episode, _ = await begin(engine, max_turns=2)
    result = await episode.step("I would like to look around.")
    assert result.observation.startswith("Error: ") and result.observation.endswith(offer(LISTED))
    assert not result.done and engine.commands == []
    result = await episode.step("hm")
    assert (result.done, result.reward, result.status) == (True, 0.0, "task limit reached")
    assert result.metrics["malformed_replies"] == 2.0


async def test_three_equal_replies_end_it_from_the_fourth_on_and_others_between_count_only_with_an_action() -> None:
    episode, _ = await begin(ScriptedEngine())
    same = [await episode.step("ACTION: look") for _ in range(3)]
    assert not any(result.done for result in same)
    result = await episode.step("ACTION: look")
    assert (result.done, result.reward, result.status) == (True, 0.0, "agent invalid action")

    episode, _ = await begin(ScriptedEngine())
    replies = ["ACTION: go to shelf 1", "ACTION: look", "ACTION: look", "nothing", "ACTION: look"]
    results = [await episode.step(reply) for reply in replies]
    assert [result.done for result in results] == [False] * 4 + [True]

    episode, _ = await begin(ScriptedEngine())
    results = [await episode.step(f"ACTION: {LISTED[turn % 2]}") for turn in range(10)]
    assert not any(result.done for result in results)


async def test_turns_end_an_episode_by_the_config_or_the_tasks_row() -> None:
    for task, limit in (({}, 3), ({"environment": {"max_turns": 2}}, 2)):
        episode, _ = await begin(ScriptedEngine(), max_turns=3, **task)
        results = [await episode.step(f"ACTION: {LISTED[turn % 2]}") for turn in range(limit)]
        assert [result.done for result in results] == [False] * (limit - 1) + [True]
        assert results[-1].status == "task limit reached"


async def test_numbers_of_places_are_cut_off() -> None:
    engine = ScriptedEngine({"go to shelf 1": {"feedback": "You arrive at loc 7. On the shelf 1, you see a mug 1."}})
    episode, _ = await begin(engine)
    result = await episode.step("ACTION: go to shelf 1")
    assert result.observation == "On the shelf 1, you see a mug 1." + offer(LISTED)


async def test_a_turn_that_the_engine_could_not_take_did_not_happen() -> None:
    class Busy(ScriptedEngine):
        fails = True

        async def step(self, command: str) -> dict[str, Any]:
            if self.fails:
                raise EpisodeLostError("for a moment")
            return await super().step(command)

    engine = Busy()
    episode, _ = await begin(engine, max_turns=2)
    with pytest.raises(EpisodeLostError):
        await episode.step("ACTION: look")
    engine.fails = False
    assert not (await episode.step("ACTION: look")).done


def test_games_are_counted_in_a_sorted_tree_or_in_a_file(tmp_path: Path) -> None:
    for name in ("b/2/game.tw-pddl", "a/1/game.tw-pddl", "a/1/other.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_games(tmp_path, AlfworldConfig()).names == ["a/1/game.tw-pddl", "b/2/game.tw-pddl"]
    games = tmp_path / "games.json"
    games.write_text(json.dumps({"x": ["b/2/game.tw-pddl"], "y": ["a/1/game.tw-pddl"]}))
    assert list_games(tmp_path, AlfworldConfig(games=games)).names == ["b/2/game.tw-pddl", "a/1/game.tw-pddl"]
    for broken in ("{", "[1]", '{"x": 3}', "[]"):
        games.write_text(broken)
        with pytest.raises(ConfigError, match="alfworld"):
            list_games(tmp_path, AlfworldConfig(games=games))


def test_a_task_names_its_game_by_index_or_by_path_below_the_data() -> None:
    data, games = Path("/data"), GameList([GAME], "envgateway.alfworld.games (/list.json)")
    assert game_of({"index": 0}, games, data) == GAME
    assert game_of({"game": "x/game.tw-pddl"}, games, data) == "x/game.tw-pddl"
    for task in (
        {},
        {"index": 1},
        {"index": -1},
        {"index": True},
        {"index": "0"},
        {"game": "../etc"},
        {"game": "/etc"},
    ):
        with pytest.raises(InvalidRequestError):
            game_of(task, games, data)
    with pytest.raises(
        InvalidRequestError, match=r"^envgateway.alfworld.games \(/list.json\) holds 1 games.* index 4648$"
    ):
        game_of({"index": 4648}, games, data)
