"""One episode of ``household_toy``: a goal, actions in words, reward 1 when the goal is reached within the turns.

A task's row may have ``index``, which then decides the house instead of the episode's seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import Field

from services.common.config.base import Section
from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import (
    MOST_COMMAND_CHARS,
    EndStatus,
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
        return list(self._effects())

    def act(self, action: str) -> str | None:
        """Carry out an action. Returns the observation; None for an impossible action."""
        effect = self._effects().get(action)
        return None if effect is None else effect()

    def _effects(self) -> dict[str, Callable[[], str]]:
        effects: dict[str, Callable[[], str]] = {"look": self.look}
        effects |= {f"go to {room}": partial(self._go, room) for room in self._doors[self.room]}
        for place in self._places[self.room]:
            if not place.is_open:
                effects[f"open {place.name}"] = partial(self._open, place)
                continue
            if len(self.carried) < _CARRIED:
                for thing in place.things:
                    told = f"You take the {thing}."
                    effects[f"take {thing} from {place.name}"] = partial(_move, thing, place.things, self.carried, told)
            for thing in self.carried:
                told = f"You put the {thing} {_on(place)}."
                effects[f"put {thing} {_on(place)}"] = partial(_move, thing, self.carried, place.things, told)
        return effects

    def _go(self, room: str) -> str:
        self.room = room
        return self.look()

    def _open(self, place: Place) -> str:
        place.is_open = True
        return f"You open it: {place.described}."


def _move(thing: str, source: list[str], target: list[str], told: str) -> str:
    source.remove(thing)
    target.append(thing)
    return told


def _on(place: Place) -> str:
    return f"{'in' if place.is_container else 'on'} {place.name}"


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

    def __init__(self) -> None:
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


class HouseholdToyWorld:
    """Houses share nothing."""

    build = HouseholdToyEnvironment

    async def close(self) -> None:
        pass


def make_world(config: EnvGatewayConfig, sandbox: object) -> HouseholdToyWorld:
    return HouseholdToyWorld()
