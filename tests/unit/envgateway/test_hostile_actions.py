"""Effects of an action's bytes on a world: the action costs its turn only. No exception, no long turn, no other try."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.worlds import webshop_pages
from extras.worlds.alfworld import choose
from extras.worlds.household_toy import HouseholdToyEnvironment
from extras.worlds.messages import read_action
from extras.worlds.settings import GamesConfig, WebshopConfig
from extras.worlds.tests.webshop_made import write_catalogue
from extras.worlds.textworld import REFUSED, TextworldEpisode, is_of_the_game
from extras.worlds.webshop_pages import WebshopWorld
from services.envgateway.envs.base import (
    MOST_COMMAND_CHARS,
    ActionFailedError,
    EndStatus,
    EpisodeLostError,
    Observation,
    StepResult,
)
from services.envgateway.envs.episodes import EpisodeManager, GuardedEnvironment
from services.envgateway.envs.gymnasium import GymnasiumEnvironment
from tests.integration.envgateway.environments.serving import registry

HUGE = 2_000_000  # what reads it again for each of its characters takes hours: its test does not end


@pytest.mark.parametrize(
    "command",
    [
        "save", "restore", "restart", "quit", "q", "script", "look. script", "look, then save", "tw-trace-actions",
        "\\x", "\\h", "\\", "look\\", "restrict commands", "a\0b", "caf\u00e9", "\ud800", "look\rlook", "<score>9</score>",
        "*** the end ***", "a" * 201, "", "...", "purloin coin", "look and quit", '"save"',
    ],
)  # fmt: skip
def test_commands_of_the_interpreter_do_not_reach_the_game(command: str) -> None:
    assert not is_of_the_game(command)


@pytest.mark.parametrize(
    "command",
    [
        "look", "take knife from table", "cook chef's pork-chop with stove", "take all. go east", "examine save point",
        "insert type 4 latchkey into box", "x recording", "drop the tree", "unlock door with half-eaten key",
    ],
)  # fmt: skip
def test_commands_of_the_game_do(command: str) -> None:
    assert is_of_the_game(command)


async def test_a_command_that_is_refused_costs_its_turn_and_the_engine_never_sees_it(tmp_path: Path) -> None:
    (tmp_path / "a.z8").touch()

    class Engine:
        async def open(self, settings: Mapping[str, Any]) -> tuple[Engine, dict[str, Any]]:
            return self, {"feedback": "A room.", "admissible": ["look"], "objective": "", "max_score": 1.0}

        async def step(self, command: str) -> dict[str, Any]:
            raise AssertionError(f"the engine saw {command!r}")

    episode = TextworldEpisode(Engine(), GamesConfig(games=tmp_path, max_turns=3))  # type: ignore[arg-type]
    await episode.reset({"index": 0}, 0)
    results = [await episode.step(f"ACTION: {command}") for command in ("\\x", "save", "a" * 10_000)]
    assert REFUSED in results[0].observation and "look" in results[0].observation
    assert [(result.reward, result.done) for result in results] == [(0.0, False), (0.0, False), (0.0, True)]
    assert results[-1].metrics["malformed_replies"] == 3.0


@pytest.mark.parametrize("command", ["go to " * HUGE, "x" * HUGE, "a b c d " * (HUGE // 8)])
def test_a_command_of_megabytes_is_no_command(command: str) -> None:
    assert read_action(f"ACTION: {command}") is None
    assert read_action("ACTION: " + "x" * MOST_COMMAND_CHARS) is not None


@given(st.text(max_size=MOST_COMMAND_CHARS))
def test_the_most_alike_action_is_one_that_is_listed_or_the_command_itself(command: str) -> None:
    listed = ["go to shelf 1", "look", "take mug 1 from shelf 1"]
    assert choose(command, listed) in {*listed, command}


_PLAIN_REPLY = re.compile(r"[Aa]ction: *\n* *((search|click)\[.+?])")
_PLAIN_ACTION = re.compile(r"(.+)\[(.+)\]")
_PIECES = ["Action:", "action:", " ", "\n", "search[", "click[", "]", "[", "a", "search[]]", "\r", "\u2028"]
_texts = st.lists(st.sampled_from(_PIECES), max_size=24).map("".join)


@given(_texts)
def test_a_shop_reply_is_read_as_the_plain_expression_reads_it(reply: str) -> None:
    found = _PLAIN_REPLY.search(reply)
    assert webshop_pages.action_of(reply, "agentbench") == (found[1] if found else None)


@given(_texts)
def test_a_shop_action_is_read_as_the_plain_expression_reads_it(action: str) -> None:
    found = _PLAIN_ACTION.match(action)
    assert webshop_pages._parts(action) == (found.groups() if found else None)


@pytest.fixture
def shop(tmp_path: Path) -> WebshopWorld:
    return WebshopWorld(WebshopConfig(data=write_catalogue(tmp_path), max_turns=10**6))


@pytest.mark.parametrize(("style", "page"), [("agentbench", "text"), ("bare", "url")])
async def test_replies_that_make_an_expression_go_back_are_read_once(shop: WebshopWorld, style: str, page: str) -> None:
    bombs = [
        "Action:" + " " * HUGE, "Action:" + "\n" * HUGE, "Action: search[" * (HUGE // 15), "[" * HUGE, "]" * HUGE,
        "a[" * HUGE, "Action: search[" + "the " * (HUGE // 4) + "]", "search[" + "mug " * (HUGE // 4) + "]",
        "Action:click[" + "[" * HUGE, "x" * HUGE + "[a]",
    ]  # fmt: skip
    environment = {"style": style, "observation": page}
    for bomb in bombs:
        episode = shop.build()
        await episode.reset({"index": 0, "environment": environment}, 0)
        result = await asyncio.to_thread(episode.step, bomb)
        assert result.reward == 0.0 and len(result.observation) < 20_000


async def test_absent_pages_ids_and_addresses_have_no_effect(shop: WebshopWorld) -> None:
    episode = shop.build()
    await episode.reset({"index": 0}, 0)
    asked = [
        "b00000000a",
        "B0NOTHERE",
        "../../etc/passwd",
        "http://127.0.0.1/done",
        "buy now",
        "next >",
        "< prev",
        "\0",
    ]
    for value in [
        *asked,
        "search",
        "navy blue",
        "attributes",
        "item_page/0/B00000000A",
        "%s%n",
        "\ud800",
        "ｂｕｙ ｎｏｗ",
    ]:
        result = episode.step(f"Action: click[{value}]")
        assert (result.reward, result.done) == (0.0, False)
        assert "Search" in result.observation and "Buy Now" not in result.observation.split("Observation:")[-1]


class _Discrete:
    n = 4


class _Maze:
    action_space = _Discrete()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"start {seed}", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert 0 <= action < 4
        return f"went {action}", 1.0, False, False, {}


@pytest.mark.parametrize("action", ["9" * 5000, "1" * HUGE, "4", "", "-", "1e400", "\u00b2", "9" * 19, "\0"])
def test_a_number_outside_of_the_action_space_gets_an_error_and_no_reward(action: str) -> None:
    maze = GymnasiumEnvironment(_Maze())
    assert maze.reset({}, 7).text.startswith("start 7")
    result = maze.step(action)
    assert (result.reward, result.done) == (0.0, False)
    assert "whole number from 0 to 3" in result.observation


async def test_household_toy_takes_megabytes_for_an_impossible_action() -> None:
    house = HouseholdToyEnvironment()
    await house.reset({"index": 1}, 0)
    for action in ("look " * HUGE, "action: " * (HUGE // 8), "ACTION:" + "a " * HUGE, "\ud800", ""):
        result = await house.step(action)
        assert (result.observation, result.reward) == ("Nothing happens.", 0.0)


class Failing:
    """Raises or returns the value that the action names."""

    what: Any = None

    def __init__(self, context: object) -> None:
        pass

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation(text="go\ud800")

    async def step(self, action: str) -> StepResult:
        return _do(action)

    async def close(self) -> None:
        pass


class FailingPlain(Failing):
    def step(self, action: str) -> StepResult:  # type: ignore[override]
        return _do(action)


def _do(action: str) -> Any:
    kinds: dict[str, type[BaseException]] = {
        "exit": SystemExit, "interrupt": KeyboardInterrupt, "cancel": asyncio.CancelledError, "value": ValueError,
        "stop": StopIteration, "close": GeneratorExit, "base": BaseException, "recursion": RecursionError, "group": OSError,
    }  # fmt: skip
    if action in kinds:
        raise kinds[action]("x\ud800" * 1_000_000)
    returned = {
        "none": None,
        "tuple": ("", 1.0, True),
        "nan": StepResult(reward=math.nan),
        "inf": StepResult(reward=math.inf),
        "number": StepResult(observation=5),  # type: ignore[arg-type]
        "words": StepResult(reward="much"),  # type: ignore[arg-type]
        "surrogate": StepResult(observation="\ud800", metrics={"a": True}),
    }
    return returned[action]


FAILING = {"failing": Failing, "plain": FailingPlain}
RAISED = ["exit", "interrupt", "cancel", "value", "stop", "base", "recursion", "group"]
RETURNED = ["none", "tuple", "nan", "inf", "number", "words"]


@pytest.mark.parametrize(
    ("name", "action"), [*((name, action) for name in FAILING for action in (*RAISED, *RETURNED)), ("plain", "close")]
)
async def test_a_failing_user_class_loses_only_its_episode(name: str, action: str) -> None:
    known = registry(factories=FAILING)
    episodes = EpisodeManager(known, max_episodes=4, lease_s=60.0, step_timeout_s=5.0)
    start = await episodes.create("", name, {}, 0)
    other = await episodes.create("", name, {}, 0)
    assert start.observation.text == "go?"
    with pytest.raises(EpisodeLostError) as failure:
        await episodes.step(start.episode_id, 1, action)
    assert len(failure.value.message) < 1000
    result = await episodes.step(other.episode_id, 1, "surrogate")
    assert (result.observation, result.metrics) == ("?", {"a": 1.0})
    assert (episodes.num_live, episodes.counts["failed"]) == (1, 1)
    await episodes.close_all()


@pytest.mark.parametrize(
    "error", [ValueError("x" * HUGE), KeyError("x"), RecursionError(), ActionFailedError("engine")]
)
async def test_a_fault_of_a_built_in_world_costs_the_action_that_meets_it(error: Exception) -> None:
    class Faulty(Failing):
        def step(self, action: str) -> StepResult:  # type: ignore[override]
            raise error

    known = registry()
    world = GuardedEnvironment(Faulty(None), "faulty", known.failed_actions)
    result = await world.step("anything")
    assert (result.reward, result.done, result.status) == (0.0, True, EndStatus.INVALID_ACTION)
    assert known.gauges == {"faulty_failed_actions": 1.0}


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "no space"), EpisodeLostError("its process died")])
async def test_a_machine_failure_stays_a_failure_of_a_built_in_world(error: Exception) -> None:
    class Broken(Failing):
        def step(self, action: str) -> StepResult:  # type: ignore[override]
            raise error

    with pytest.raises(type(error)):
        await GuardedEnvironment(Broken(None), "broken", registry().failed_actions).step("anything")


async def test_only_worlds_of_ours_are_guarded() -> None:
    known = registry(factories={"mine": Failing})
    assert isinstance(known.build("mine"), Failing)
    assert isinstance(known.build("tool"), GuardedEnvironment)
