"""The made house: same seed, same house; every house can be solved; impossible actions have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.worlds.household_toy import MOST_ROOMS, MOST_THINGS, House, HouseholdToyEnvironment
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import EndStatus

HOUSES = (st.integers(-(2**62), 2**62), st.integers(1, MOST_ROOMS), st.integers(1, MOST_THINGS))


def solve(house: House) -> list[str]:
    """The actions that win, which are done: look into everything, then carry the wanted thing to its place."""
    done: list[str] = []

    def do(action: str) -> None:
        assert house.act(action) is not None
        done.append(action)

    def roam(came_from: str, here: Callable[[], bool]) -> bool:
        """Whether ``here`` was true in a room; rooms form a tree."""
        room = house.room
        for action in [action for action in house.actions() if action.startswith("open ")]:
            do(action)
        if here():
            return True
        for action in [action for action in house.actions() if action.startswith("go to ")]:
            if action != f"go to {came_from}":
                do(action)
                if roam(room, here):
                    return True
                do(f"go to {room}")
        return False

    def has_taken() -> bool:
        if house.wanted not in house.carried:
            sought = [action for action in house.actions() if action.startswith("take ")]
            if not sought and len(house.carried) == 2:  # both hands are full
                do(next(a for a in house.actions() if a.startswith("put ") and not a.endswith(house.target.name)))
            for action in house.actions():
                if action.startswith(f"take {house.wanted} "):
                    do(action)
        return house.wanted in house.carried

    def has_put() -> bool:
        for action in house.actions():
            if action.startswith(f"put {house.wanted} ") and action.endswith(house.target.name):
                do(action)
        return house.is_solved

    assert roam("", has_taken) and roam("", has_put)
    return done


def _environment() -> HouseholdToyEnvironment:
    return HouseholdToyEnvironment()


@given(*HOUSES, st.lists(st.integers(0, 10**6), max_size=20))
def test_every_house_can_be_solved_from_wherever_one_has_got_to(
    seed: int, num_rooms: int, num_things: int, walk: list[int]
) -> None:
    house = House(seed, num_rooms, num_things)
    for choice in walk:
        if house.is_solved:
            break
        assert house.act(house.actions()[choice % len(house.actions())]) is not None
    if not house.is_solved:
        solve(house)
    assert house.is_solved


@given(*HOUSES)
def test_the_same_seed_gives_the_same_house(seed: int, num_rooms: int, num_things: int) -> None:
    one, other = (House(seed, num_rooms, num_things) for _ in range(2))
    assert (one.goal, one.look(), solve(one)) == (other.goal, other.look(), solve(other))


async def test_an_episode_is_won_by_the_solution_and_pays_once() -> None:
    environment = _environment()
    start = await environment.reset({"index": 5}, 0)
    house = House(5, 4, 6)
    assert start.text.startswith(house.goal) and list(start.admissible_actions) == house.actions()
    *before, last = solve(House(5, 4, 6))
    for action in before:
        step = await environment.step(f"Thought: hm\nAction:  {action.upper()} ")
        assert (step.reward, step.done) == (0.0, False) and step.observation != "Nothing happens."
    end = await environment.step(last)
    assert (end.reward, end.done, end.status, end.metrics["invalid_actions"]) == (1.0, True, EndStatus.COMPLETED, 0.0)


async def test_an_impossible_action_only_takes_a_turn() -> None:
    environment = _environment()
    await environment.reset({"environment": {"max_turns": 2}}, 9)
    first = await environment.step("fly to the moon")
    assert (first.observation, first.done, first.metrics["invalid_actions"]) == ("Nothing happens.", False, 1.0)
    assert (await environment.step("look")).status == EndStatus.TURN_LIMIT


@pytest.mark.parametrize("task", [{"index": "x"}, {"environment": {"num_rooms": 99}}, {"environment": {"rooms": 1}}])
async def test_a_row_that_makes_no_house_is_refused(task: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await _environment().reset(task, 0)
