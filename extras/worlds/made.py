"""Small worlds for machines without the data of the real ones: houses for ALFWorld's engine, a catalogue for WebShop."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template

from services.common.errors import ConfigError
from services.common.installing import install

# --- Small houses for the real engine, where ALFWorld's own games are not at hand: put one thing somewhere else.


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
    """Rows as ``write_games`` takes them, ``walkthrough`` included. ``grammar`` is the text of `alfred.twl2`."""
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
    text = Path(__file__).with_name("house.pddl.txt").read_text(encoding="utf-8")
    stops = [f"loc_bar_{at}_bar_0_bar_0_bar_30" for at in range(_NUM_PLACES + 1)]
    values = {"number": number, "places": places, "lies": lies, "thing": thing, "place": place, "stops": stops}
    # The end of a name, from which the engine derives its object numbers.
    problem: str = Template(text, trim_blocks=True).render(id="_bar__plus_01_dot_00" * 3, **values)
    return problem


# --- Write games into the tree of folders that ALFWorld reads.


def write_games(rows: Iterable[Mapping[str, Any]], pddl_domain: str, folder: Path) -> list[str]:
    """The games written, in order, as paths relative to ``folder``."""
    names = []
    for row in rows:
        path = folder / row["game"]
        path.parent.mkdir(parents=True, exist_ok=True)
        game = {key: row[key] for key in ("grammar", "pddl_problem", "walkthrough")}
        path.write_text(json.dumps({"pddl_domain": pddl_domain, **game, "solvable": True}), encoding="utf-8")
        about = {key: row[key] for key in ("task_type", "pddl_params", "scene")}
        about |= {"plan": {"high_pddl": []}, "turk_annotations": {"anns": []}}
        path.with_name("traj_data.json").write_text(json.dumps(about), encoding="utf-8")
        names.append(row["game"])
    return names


# --- Makes a small catalogue of invented products in WebShop's raw form, for machines without the real catalogue.


_BRANDS = ("Alder", "Brisk", "Cobalt", "Dovetail", "Ember", "Fathom")
_KINDS = (
    ("Water Bottle", "home", ("Home & Kitchen", "Dining", "Bottles"), ("leak proof", "stainless steel")),
    ("Desk Lamp", "garden", ("Tools & Home", "Lighting", "Desk Lamps"), ("energy efficient", "usb charging")),
    ("Running Shoes", "fashion", ("Clothing & Shoes", "Shoes", "Running"), ("non slip", "quick drying")),
    ("Wireless Speaker", "electronics", ("Electronics", "Audio", "Speakers"), ("fast charging", "water resistant")),
)
_COLORS = ("black", "blue", "red", "white")


def write_catalogue(folder: Path, num_products: int, seed: int) -> int:
    """Write products, their attributes and one shopping instruction for each; returns the number of instructions."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    items, attributes, instructions = [], {}, {}
    for number in range(num_products):
        noun, category, path, words = _KINDS[number % len(_KINDS)]
        asin, attribute = f"B{number:09}", draw.choice(words)
        items.append(
            {
                "asin": asin,
                "name": f"{draw.choice(_BRANDS)} {attribute.title()} {noun}, No. {number}",
                "category": category,
                "query": noun.lower(),
                "product_category": " › ".join(path),
                "full_description": f"A {noun.lower()} that is {attribute}.",
                "small_description": [attribute, f"{noun.lower()} for every day"],
                "pricing": f"${draw.randrange(500, 15_000) / 100:.2f}",
                "customization_options": {"Color": [{"value": color, "image": None} for color in _COLORS]},
                "images": ["none"],
            }
        )
        attributes[asin] = {"attributes": [attribute]}
        instructions[asin] = [
            {
                "asin": asin,
                "instruction": f"i am looking for a {noun.lower()} that is {attribute}.",
                "instruction_attributes": [attribute],
                "instruction_options": [],
            }
        ]
    for name, content in (
        ("items_shuffle_1000.json", items),
        ("items_ins_v2_1000.json", attributes),
        ("items_human_ins.json", instructions),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return len(instructions)


# --- The stand-ins of a profile: settings that point the gateway to a world on this machine, and the rows of its tasks.


def houses_here(section: Mapping[str, Any], worlds: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The folder that the recipe names if present, else houses that are made once below ``worlds``.

    Raises:
        ConfigError: ALFWorld's engine is not installed.
    """

    def make(folder: Path) -> None:
        package = package_data()
        grammar = (package / "alfred.twl2").read_text(encoding="utf-8")
        write_games(houses(24, 1, grammar), (package / "alfred.pddl").read_text(encoding="utf-8"), folder)

    own = section["data"]
    games = own if own is not None and Path(own).is_dir() else _written_once(worlds / "alfworld-houses", make)
    rows = {"generator": "extras.worlds.made:games", "settings": {"data": str(games)}}
    return {"data": str(games), "games": None}, rows


def shop_here(section: Mapping[str, Any], worlds: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The catalogue that the recipe names if present, else one that is made once below ``worlds``. Every word counts as a
    noun, so that no tagger model is needed."""
    settings: dict[str, Any] = {"tagger": "words"}
    if section["data"] is None or not Path(section["data"]).is_dir():
        made = _written_once(worlds / "webshop-catalogue", lambda folder: write_catalogue(folder, 48, 1))
        settings |= {"data": str(made), "goals": None}
    return settings, {"generator": "extras.worlds.made:places", "settings": {"count": 48}}


def _written_once(folder: Path, write: Callable[[Path], object]) -> Path:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        write(partial_folder)
        try:
            partial_folder.rename(folder)
        except OSError:  # another run has written it meanwhile
            shutil.rmtree(partial_folder)
    return folder


def places(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``{"id", "index", "messages"}``: the first tasks of an environment, by their place in its own list."""
    for index in range(count):
        yield {"id": str(index), "index": index, "messages": []}


def games(seed: int, data: str) -> Iterator[dict[str, Any]]:
    """``{"id", "game", "messages", "expert"}``: ALFWorld's games below a folder with the commands that win them, those
    with the shortest way first."""
    found = []
    for path in Path(data).rglob("game.tw-pddl"):
        walkthrough = json.loads(path.read_text(encoding="utf-8")).get("walkthrough")
        if walkthrough:
            found.append((len(walkthrough), path.relative_to(data).as_posix(), list(walkthrough)))
    for _, game, walkthrough in sorted(found):
        yield {"id": game, "game": game, "messages": [], "expert": walkthrough}
