"""One episode of ``household_toy``: a goal, actions in words, reward 1 when the goal is reached within the turns.

A task's row may have ``index``, which then decides the house instead of the episode's seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from services.common.config.base import Section
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import EndStatus, EnvironmentContext, Observation, StepResult
from services.envgateway.envs.household_toy.house import MOST_ROOMS, MOST_THINGS, House
from services.envgateway.envs.replies import MOST_COMMAND_CHARS
from services.envgateway.envs.settings import settings_of

_ACTION = re.compile(r"action:(.*)", re.IGNORECASE)


class HouseholdToySettings(Section):
    num_rooms: int = Field(default=4, ge=1, le=MOST_ROOMS)
    """Rooms of the house."""
    num_things: int = Field(default=6, ge=1, le=MOST_THINGS)
    """Things that lie about."""
    max_turns: int = Field(default=30, ge=1)
    """Turns of the episode."""


class HouseholdToyEnvironment:
    """Environment of one house. Async, so that a turn needs no thread: a turn takes microseconds."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._settings = HouseholdToySettings()
        self._house: House | None = None
        self._turns = 0
        self._refused = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._settings = settings_of(task, HouseholdToySettings)
        index = task.get("index", seed)
        if not isinstance(index, int):
            raise InvalidRequestError(f"the task's index is {index!r}; it must be a whole number")
        house = House(index, self._settings.num_rooms, self._settings.num_things)
        self._house = house
        return Observation(text=f"{house.goal}\n{house.look()}", admissible_actions=house.actions())

    async def step(self, action: str) -> StepResult:
        """Take a turn: the action is the text behind the last ``action:`` of a reply, or the whole reply."""
        assert self._house is not None, "step before reset"
        house = self._house
        said = _ACTION.findall(action)
        command = said[-1] if said else action
        # Words are only counted where there can be a command: splitting megabytes would hold up every other episode.
        happened = house.act(" ".join(command.lower().split())) if len(command) <= MOST_COMMAND_CHARS else None
        self._turns += 1
        self._refused += happened is None
        at_end = self._turns >= self._settings.max_turns
        status = EndStatus.COMPLETED if house.is_solved else EndStatus.TURN_LIMIT if at_end else ""
        return StepResult(
            observation="Nothing happens." if happened is None else happened,
            reward=float(house.is_solved),
            done=house.is_solved or at_end,
            admissible_actions=house.actions(),
            metrics={"invalid_actions": float(self._refused)},
            status=status,
        )

    async def close(self) -> None:
        self._house = None
