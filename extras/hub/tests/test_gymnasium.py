"""Environments of gymnasium's registry: text of observations, actions in replies, episodes alone and as vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from extras.hub.gymnasium import GymnasiumWorld, drawing, text_of
from extras.hub.settings import GymnasiumConfig
from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import ConfigError, InvalidRequestError
from services.common.installing import install
from services.envgateway.envs.base import StepResult
from services.envgateway.envs.episodes import make_worlds
from services.envgateway.envs.gymnasium import ActionReader

LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "settings": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["down", "down", "right", "right", "down", "right"]


@pytest.fixture
def opened() -> Iterator[Any]:
    episodes: list[Any] = []

    def begin(**settings: Any) -> Any:
        episodes.append(GymnasiumWorld("lake", GymnasiumConfig(**{**LAKE, **settings})).build())
        return episodes[-1]

    yield begin
    for episode in episodes:
        episode.close()


@pytest.mark.needs("gymnasium")
def test_an_episode_pays_the_rewards_of_the_environment_and_tells_its_statistics(opened: Any) -> None:
    assert GymnasiumWorld("lake", GymnasiumConfig(**LAKE)).problem() is None
    episode = opened(instruction="Reach 15.")
    assert episode.reset({}, 2**40).text == "Reach 15.\n\n0"
    results: list[StepResult] = [episode.step(f"I go {word}.") for word in WAY]
    assert [result.observation for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].metrics == {"episode_return": 1.0, "episode_length": 6.0, "invalid_actions": 0.0}


@pytest.mark.needs("gymnasium")
def test_a_reply_without_an_action_moves_nothing_and_is_told(opened: Any) -> None:
    episode = opened()
    episode.reset({}, 0)
    said = episode.step("leftover downtown")
    assert said == StepResult(
        observation="The action must be one of left, down, right, up.", metrics={"invalid_actions": 1.0}
    )
    assert episode.step("Not LEFT but Down").observation == "4", "the last name counts, without regard to case"


@pytest.mark.needs("gymnasium")
def test_the_turn_limit_of_the_environment_ends_the_episode(opened: Any) -> None:
    episode = opened(settings={"is_slippery": False, "max_episode_steps": 2})
    episode.reset({}, 0)
    assert not episode.step("left").done
    last = episode.step("left")
    assert last.done
    assert last.status == "task limit reached"


@pytest.mark.needs("gymnasium")
def test_a_drawing_shows_the_place(opened: Any) -> None:
    assert opened(observation="render").reset({}, 0).text == "[S]FFF\nFHFH\nFFFH\nHFFG"


@pytest.mark.needs("gymnasium")
def test_a_vector_pays_the_mean_return_of_its_copies(opened: Any) -> None:
    episode = opened(num_envs=2)
    assert episode.reset({}, 0).text == "1: 0\n2: 0"
    total = 0.0
    for place, word in enumerate(WAY):  # the second falls into the hole at 5
        second = ["down", "right"][place] if place < 2 else "left"
        result = episode.step(f"1: {word}\n2: {second}")
        total += result.reward
        assert result.metrics["copies_playing"] == (2.0 if place == 0 else 1.0 if place < 5 else 0.0)
    assert result.done
    assert total == 0.5
    assert result.metrics["episode_return"] == 0.5
    assert result.metrics["episode_length"] == 4.0


@pytest.mark.needs("gymnasium")
def test_a_copy_that_has_ended_needs_no_action_and_each_other_does(opened: Any) -> None:
    episode = opened(num_envs=3)
    episode.reset({}, 0)
    assert "line for each of 1, 2, 3" in episode.step("1: down\n2: down").observation
    episode.step("1: down\n2: down\n3: down")
    assert episode.step("1: right\n2: down\n3: down").observation == "2: 8\n3: 8", "the first fell into the hole"
    assert episode.step("2: down\n3: right").observation == "3: 9"


@pytest.mark.needs("gymnasium")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLake"),
        ({"settings": {"is_slipery": False}}, "is_slipery"),
        ({"actions": ["left", "right"]}, "2 names, and the environment has 4 actions"),
        ({"id": "Pendulum-v1", "settings": {}, "actions": []}, "write actions: package.module:function"),
        ({"id": "no_such_module_here:Env-v0"}, "no_such_module_here"),
        ({"observation": "no_such_module_here:text"}, "no_such_module_here"),
        ({"num_envs": 2, "settings": {"is_slipery": False}}, "is_slipery"),
    ],
)
def test_what_the_recipe_says_wrong_is_told(settings: dict[str, Any], told: str) -> None:
    world = GymnasiumWorld("lake", GymnasiumConfig(**{**LAKE, **settings}))
    assert told in (world.problem() or "")
    with pytest.raises(InvalidRequestError, match=r"envgateway\.gymnasium\.lake|no_such_module"):
        world.build().reset({}, 0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"actions": ["left", "Left "]}, "a name of its own"),
        ({"actions": "left"}, "import path"),
        ({"observation": "ansi"}, "values, render"),
        ({"num_envs": 2, "observation": "render"}, "draws no text"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GymnasiumConfig(**{**LAKE, **settings})


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = make_worlds(EnvGatewayConfig(gymnasium={"lake": GymnasiumConfig(**LAKE)}))
    assert install("gymnasium") in str(made["lake"])


def test_the_name_of_another_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"envgateway\.gymnasium\.tool: the gateway has an environment of this name"):
        make_worlds(EnvGatewayConfig(gymnasium={"tool": GymnasiumConfig(**LAKE)}))


def test_numbers_in_replies() -> None:
    read = ActionReader(1, 3, [], "here")
    assert [read(reply) for reply in ("1", "take 2, no: 3", "0", "4", "", "9" * 5000)] == [1, 3, None, None, None, None]


def test_names_that_contain_each_other_are_told_apart() -> None:
    read = ActionReader(0, 3, ["go", "go up", "up"], "here")
    assert [read(reply) for reply in ("go up", "GO", "up", "going")] == [1, 0, 2, None]


def test_observations_are_readable() -> None:
    import numpy as np

    assert text_of(np.float32(0.1)) == "0.1"
    assert text_of(np.asarray([0.123456, 2.0])) == "0.1235 2"
    assert text_of((1, np.int64(2), 0)) == "1, 2, 0"
    assert text_of({"a": 1, "b": np.asarray([1, 2])}) == "a: 1\nb: 1 2"
    assert text_of("as it is") == "as it is"
    with pytest.raises(ConfigError, match="values"):
        drawing(np.zeros(3))
