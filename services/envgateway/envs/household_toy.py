"""One episode of ``household_toy``: a goal, actions in words, reward 1 when the goal is reached within the turns.

A task's row may have ``index``, which then decides the house instead of the episode's seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from services.common.config.base import Section
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import (
    MOST_COMMAND_CHARS,
    EndStatus,
    EnvironmentContext,
    Observation,
    StepResult,
    settings_of,
)

_ROOMS = ("kitchen", "bedroom", "bathroom", "study", "cellar", "attic", "hall", "garage", "pantry", "nursery")
_FURNITURE = ("table", "shelf", "desk", "bench", "counter", "rug")
_CONTAINERS = ("drawer", "cabinet", "chest", "basket", "fridge", "box")
_THINGS = tuple("mug key book lamp apple pen bell coin spoon candle towel vase clock map".split())  # noqa: SIM905
_CARRIED = 2  # hands

MOST_ROOMS = len(_ROOMS)
MOST_THINGS = len(_THINGS)


@dataclass(slots=True)
class Place:
    """Furniture; an open container shows its contents."""

    name: str
    room: str
    is_container: bool
    is_open: bool
    things: list[str] = field(default_factory=list)

    @property
    def described(self) -> str:
        if not self.is_open:
            return f"a {self.name} (closed)"
        inside = ", ".join(f"a {thing}" for thing in self.things) or "nothing"
        return f"a {self.name} with {inside}"


class House:
    """Rooms, furniture and things, and the actions that are possible there.

    The same seed and sizes give the same house. All places can be reached: rooms form a tree whose doors are open.
    """

    def __init__(self, seed: int, num_rooms: int, num_things: int) -> None:
        draw = random.Random(seed)
        rooms = draw.sample(_ROOMS, num_rooms)
        self._doors: dict[str, list[str]] = {room: [] for room in rooms}
        for number, room in enumerate(rooms[1:], 1):
            other = rooms[draw.randrange(number)]
            self._doors[room].append(other)
            self._doors[other].append(room)
        self._places: dict[str, list[Place]] = {room: [] for room in rooms}
        for room in rooms:
            for name, is_container in ((draw.choice(_FURNITURE), False), (draw.choice(_CONTAINERS), True)):
                self._places[room].append(Place(f"{room} {name}", room, is_container, not is_container))
        everywhere = [place for places in self._places.values() for place in places]
        for thing in draw.sample(_THINGS, num_things):
            draw.choice(everywhere).things.append(thing)
        self.room = rooms[0]
        self.carried: list[str] = []
        self.wanted = draw.choice([thing for place in everywhere for thing in place.things])
        self.target = draw.choice([place for place in everywhere if self.wanted not in place.things])

    @property
    def is_solved(self) -> bool:
        return self.wanted in self.target.things

    @property
    def goal(self) -> str:
        return f"Put the {self.wanted} {_on(self.target)}."

    def look(self) -> str:
        seen = "; ".join(place.described for place in self._places[self.room])
        doors = ", ".join(self._doors[self.room]) or "nowhere"
        hands = ", ".join(f"a {thing}" for thing in self.carried) or "nothing"
        return f"You are in the {self.room}. You see {seen}. Doors lead to: {doors}. You carry {hands}."

    def actions(self) -> list[str]:
        """All actions that have an effect here."""
        possible = ["look", *(f"go to {room}" for room in self._doors[self.room])]
        for place in self._places[self.room]:
            if not place.is_open:
                possible.append(f"open {place.name}")
                continue
            if len(self.carried) < _CARRIED:
                possible += [f"take {thing} from {place.name}" for thing in place.things]
            possible += [f"put {thing} {_on(place)}" for thing in self.carried]
        return possible

    def act(self, action: str) -> str | None:
        """Carry out an action. Returns the observation; None for an impossible action."""
        if action not in self.actions():
            return None
        verb, _, rest = action.partition(" ")
        if verb == "look":
            return self.look()
        if verb == "go":
            self.room = rest.removeprefix("to ")
            return self.look()
        for place in self._places[self.room]:
            if action == f"open {place.name}":
                place.is_open = True
                return f"You open it: {place.described}."
            for thing in place.things:
                if action == f"take {thing} from {place.name}":
                    place.things.remove(thing)
                    self.carried.append(thing)
                    return f"You take the {thing}."
            for thing in self.carried:
                if action == f"put {thing} {_on(place)}":
                    self.carried.remove(thing)
                    place.things.append(thing)
                    return f"You put the {thing} {_on(place)}."
        raise AssertionError(f"{action!r} is possible and unknown")

    def solution(self) -> list[str]:
        """Actions that solve the task from the present state, without a search: the house knows where the things are."""
        steps: list[str] = []
        here = self.room
        if self.wanted not in self.carried:
            source = next(place for places in self._places.values() for place in places if self.wanted in place.things)
            steps += [*self._way(here, source.room), *_opened(source)]
            if len(self.carried) == _CARRIED:
                steps.append(f"put {self.carried[0]} {_on(source)}")
            steps.append(f"take {self.wanted} from {source.name}")
            here = source.room
        return [
            *steps,
            *self._way(here, self.target.room),
            *_opened(self.target),
            f"put {self.wanted} {_on(self.target)}",
        ]

    def _way(self, start: str, end: str, coming_from: str = "") -> list[str]:
        """Doors to go through: in a tree there is one way."""
        if start == end:
            return []
        for room in self._doors[start]:
            if room != coming_from and (room == end or self._way(room, end, start)):
                return [f"go to {room}", *self._way(room, end, start)]
        return []


def _on(place: Place) -> str:
    return f"{'in' if place.is_container else 'on'} {place.name}"


def _opened(place: Place) -> list[str]:
    return [] if place.is_open else [f"open {place.name}"]


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
