"""Small houses for the real engine, where ALFWorld's own games are not at hand: put one thing somewhere else.

Domain and grammar come with the package `alfworld`; places, things and goals are drawn here. A house has one of every
kind, so each goal is met by the same four commands: go, take, go, move.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.installing import install

PLACES = (
    "ArmChair",
    "Bed",
    "CoffeeTable",
    "CounterTop",
    "Desk",
    "DiningTable",
    "Dresser",
    "Shelf",
    "SideTable",
    "Sofa",
)
THINGS = ("Book", "CreditCard", "KeyChain", "Newspaper", "Pen", "Pencil", "RemoteControl", "Vase", "Watch", "CellPhone")
_NUM_PLACES, _NUM_THINGS = 6, 4


def package_data() -> Path:
    """The folder with `alfred.pddl` and `alfred.twl2`; ``ConfigError`` where the package is not installed.

    The package itself is not imported: that would overwrite ``sys.argv``.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise ConfigError(f"ALFWorld's engine is not installed: {install('alfworld')}")
    return Path(spec.origin).parent / "data"


def houses(count: int, seed: int, grammar: str) -> Iterator[dict[str, Any]]:
    """Rows as ``unpack`` takes them, ``walkthrough`` included. ``grammar`` is the text of `alfred.twl2`."""
    draw = random.Random(seed)
    for number in range(count):
        places, things = draw.sample(PLACES, _NUM_PLACES), draw.sample(THINGS, _NUM_THINGS)
        lies = {thing: draw.choice(places) for thing in things}
        thing = things[0]
        place = draw.choice([other for other in places if other != lies[thing]])
        one, there, here = f"{thing.lower()} 1", f"{place.lower()} 1", f"{lies[thing].lower()} 1"
        yield {
            "game": f"json_2.1.1/made/pick_and_place_simple-{thing}-None-{place}-0/trial_{number:03}/game.tw-pddl",
            "task_type": "pick_and_place_simple",
            "pddl_params": {"object_target": thing, "parent_target": place, "mrecep_target": "", "toggle_target": ""},
            "scene": {"floor_plan": "FloorPlan0", "scene_num": 0},
            "grammar": grammar.replace("UNKNOWN GOAL", f"put some {thing.lower()} on {place.lower()}"),
            "pddl_problem": _problem(number, places, lies, thing, place),
            "walkthrough": [f"go to {here}", f"take {one} from {here}", f"go to {there}", f"move {one} to {there}"],
        }


def _problem(number: int, places: list[str], lies: dict[str, str], thing: str, place: str) -> str:
    where = {name: f"loc_bar_{1 + at}_bar_0_bar_0_bar_30" for at, name in enumerate(places)}
    stops = ["loc_bar_0_bar_0_bar_0_bar_30", *where.values()]
    objects = ["agent1 - agent", *(f"{stop} - location" for stop in stops)]
    objects += [f"{_id(name)} - receptacle" for name in places] + [f"{_id(name)} - object" for name in lies]
    objects += [f"{name}Type - rtype" for name in places] + [f"{name}Type - otype" for name in lies]
    facts = [f"(atLocation agent1 {stops[0]})", "(= (total-cost) 0)"]
    for name in places:
        facts += [f"(receptacleType {_id(name)} {name}Type)", f"(receptacleAtLocation {_id(name)} {where[name]})"]
        facts += [f"(canContain {name}Type {other}Type)" for other in lies]
    for name, at in lies.items():
        facts += [f"(objectType {_id(name)} {name}Type)", f"(pickupable {_id(name)})"]
        facts += [f"(inReceptacle {_id(name)} {_id(at)})", f"(objectAtLocation {_id(name)} {where[at]})"]
    facts += [
        f"(= (distance {a} {b}) {abs(i - j)})" for i, a in enumerate(stops) for j, b in enumerate(stops) if i != j
    ]
    goal = (
        f"(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (objectType ?o {thing}Type) "
        f"(receptacleType ?r {place}Type))))"
    )
    lines = [
        f"(define (problem plan_made_{number})",
        "(:domain alfred)",
        "(:objects",
        *objects,
        ")",
        "(:init",
        *facts,
        ")",
    ]
    return "\n".join([*lines, f"(:goal (and {goal}))", ")"])


def _id(name: str) -> str:
    """A name in the form from which the engine derives its object numbers."""
    return f"{name}_bar__plus_01_dot_00_bar__plus_01_dot_00_bar__plus_01_dot_00"
