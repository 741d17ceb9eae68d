"""Products, read from files in WebShop's raw form.

``items_shuffle*.json`` has the products, ``items_ins_v2*.json`` their attributes, ``items_human_ins.json`` the shopping
instructions. Products are taken, cleaned and priced by WebShop's rules.
"""

from __future__ import annotations

import dataclasses
import random
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from extras.worlds.settings import WorldsSections
from services.common.errors import ConfigError, DatasetError, InvalidRequestError

if TYPE_CHECKING:
    from services.cli.check.worlds import AskedTasks

_LONGEST_ID = 10
_NO_PRICE = 100.0
_NO_ATTRIBUTES = ("DUMMY_ATTR",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    id: str
    title: str
    query: str
    category: str
    product_category: str  # "Beauty › Hair Care › Shampoo"
    description: str
    bullet_points: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # {"color": ("white", "wine red")}
    prices: tuple[float, ...]  # one, or the ends of a range, in dollars

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)


NO_LIMIT = 1_000_000.0
_LIMITS = [10.0 * tens for tens in range(1, 100)]
_CHOICES = 4  # the limit is one of the first few steps above the price
Option = str | tuple[str, str]  # a value, or the option's name and its value


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    product_id: str
    name: str
    query: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[Option, ...]
    price_limit: float  # dollars


def find_files(folder: Path) -> tuple[Path, Path, Path]:
    """Files of products, attributes and instructions. Raises ``ConfigError`` when one is missing, or several match."""
    if not folder.is_dir():
        raise ConfigError(f"envgateway.webshop.data: there is no folder {folder.absolute()}")
    return _one(folder, "items_shuffle"), _one(folder, "items_ins_v2"), _one(folder, "items_human_ins", exactly=True)


def read_catalogue(files: Sequence[Path]) -> tuple[dict[str, Product], list[Goal]]:
    """Products by id, in the order of the file, and their goals, without limits yet. Raises ``DatasetError`` with the file and the row."""
    of_products, of_attributes, of_instructions = files
    attributes, asked = _json(of_attributes, dict), _json(of_instructions, dict)
    products: dict[str, Product] = {}
    for number, row in enumerate(_json(of_products, list)):
        try:
            if row["asin"] != "nan" and len(row["asin"]) <= _LONGEST_ID and row["asin"] not in products:
                products[row["asin"]] = product_of(row, attributes.get(row["asin"], {}))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DatasetError(f"{of_products}: product {number}: {type(error).__name__}: {error}") from error
    goals = []
    for product in products.values():
        try:
            goals += [
                Goal(
                    product_id=product.id,
                    name=product.title,
                    query=product.query,
                    product_category=product.product_category,
                    instruction=row["instruction"].strip("."),
                    attributes=tuple(row["instruction_attributes"]),
                    options=tuple(row["instruction_options"]),
                    price_limit=NO_LIMIT,
                )
                for row in asked.get(product.id, ())
                if row["instruction_attributes"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{of_instructions}: product {product.id}: {type(error).__name__}: {error}") from error
    return products, goals


def product_of(row: Mapping[str, Any], more: Mapping[str, Any]) -> Product:
    """One product of the raw file; ``more`` is its entry in the file of attributes."""
    bullet_points = row["small_description"]
    if not isinstance(bullet_points, list):
        bullet_points = [bullet_points]
    return Product(
        id=row["asin"],
        title=row["name"],
        query=row["query"].lower().strip(),
        category=row["category"],
        product_category=row["product_category"],
        description=row["full_description"] or "",
        bullet_points=tuple(point for point in bullet_points if point is not None),
        attributes=tuple(more.get("attributes", _NO_ATTRIBUTES)),
        options=_options(row.get("customization_options") or {}),
        prices=_prices(row.get("pricing") or ""),
    )


def draw_prices(products: Iterable[Product], draw: random.Random) -> dict[str, float]:
    """The cost of each product: its price, or a draw from its range."""
    return {p.id: p.prices[0] if len(p.prices) == 1 else draw.uniform(*p.prices) for p in products}


def _options(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in raw.items()
        if contents is not None
    }


def _prices(raw: str) -> tuple[float, ...]:
    prices = tuple(float(re.sub(r"[^\d.]", "", part)) for part in raw.split("$")[1:3])
    return prices or (_NO_PRICE,)


def _one(folder: Path, name: str, *, exactly: bool = False) -> Path:
    plain = folder / f"{name}.json"
    if plain.is_file():
        return plain
    found = [] if exactly else sorted(folder.glob(f"{name}*.json"))
    if len(found) == 1:
        return found[0]
    wanted = plain.name if exactly else f"{name}*.json"
    why = f"has no {wanted}" if not found else f"has several of {wanted} and no {plain.name}"
    raise ConfigError(f"envgateway.webshop.data: {folder} {why}")


def _json(path: Path, kind: type) -> Any:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    if not isinstance(value, kind):
        raise DatasetError(f"{path}: this is no JSON {'object' if kind is dict else 'array'}")
    return value


# --- Goals of episodes: a product with a price limit, drawn from the instructions or read from a file.


def draw_goals(wishes: Iterable[Goal], prices: Mapping[str, float], seed: int) -> tuple[Goal, ...]:
    """The goals with price limits, in an order that the seed draws, too. A product above every limit has none."""
    draw = random.Random(f"limits {seed}")
    goals = []
    for wish in wishes:
        choices = [limit for limit in _LIMITS if limit > prices[wish.product_id]][:_CHOICES]
        if len(choices) >= 2:
            limit = max(draw.sample(choices, 2))
            text = f"{wish.instruction}, and price lower than {limit:.2f} dollars"
            wish = dataclasses.replace(wish, instruction=text, price_limit=limit)
        goals.append(wish)
    random.Random(seed).shuffle(goals)
    return tuple(goals)


def read_goals(path: Path) -> tuple[tuple[Goal, ...], dict[str, float]]:
    """The goals and prices of ``{"goals": [...], "prices": {id: dollars}}``. Raises ``DatasetError`` with the file and the row."""
    try:
        stored = orjson.loads(path.read_bytes())
        rows, prices = stored["goals"], {str(name): float(price) for name, price in stored["prices"].items()}
    except (OSError, orjson.JSONDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{path}: needs goals and prices: {type(error).__name__}: {error}") from error
    goals = []
    for number, row in enumerate(rows):
        try:
            goals.append(goal_of(row))
        except InvalidRequestError as error:
            raise DatasetError(f"{path}: goal {number}: {error.message}") from error
    return tuple(goals), prices


def goal_of(row: Mapping[str, Any]) -> Goal:
    """A goal in WebShop's own form. Raises ``InvalidRequestError``."""
    try:
        options = row["goal_options"]
        goal = Goal(
            product_id=row["asin"],
            name=row["name"],
            query=row["query"],
            product_category=row["product_category"],
            instruction=row["instruction_text"],
            attributes=tuple(row["attributes"]),
            options=tuple(options.items()) if isinstance(options, Mapping) else tuple(options),
            price_limit=float(row["price_upper"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"this is no goal: {type(error).__name__}: {error}") from error
    if not goal.attributes:
        raise InvalidRequestError("a goal needs at least one attribute")
    if goal.price_limit <= 0:
        raise InvalidRequestError(f"the price limit must be above 0, and is {goal.price_limit:g}")
    return goal


# --- BM25 over a catalogue: which products a line of words finds, best first.


_K1 = 0.9
_B = 0.4
_WORD = re.compile(r"\w+")


class SearchIndex:
    """Built once. A search changes no state, so threads may share the index."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._ids = [product.id for product in products]
        self._rank_of_id = np.argsort(np.argsort(np.array(self._ids or [""], dtype=object), kind="stable"))
        postings: dict[str, tuple[array[int], array[int]]] = {}  # word -> rows, counts
        lengths = np.zeros(len(products))
        for row, product in enumerate(products):
            words = Counter(_words(_text(product)))
            lengths[row] = words.total()
            for word, count in words.items():
                rows, counts = postings.setdefault(word, (array("i"), array("i")))
                rows.append(row)
                counts.append(count)
        mean = lengths.mean() if len(products) else 1.0
        penalty = _K1 * (1 - _B + _B * lengths / (mean or 1.0))
        self._postings = {word: self._scored(rows, counts, penalty) for word, (rows, counts) in postings.items()}

    def find(self, query: str, limit: int) -> list[str]:
        """Product ids; none for words that no product has."""
        scores = np.zeros(len(self._ids))
        for word, times in Counter(_words(query)).items():  # a word that is repeated is looked up once
            if word in self._postings:
                rows, weights = self._postings[word]
                scores[rows] += times * weights
        (found,) = np.nonzero(scores)
        if len(found) > limit:
            least = np.partition(scores[found], len(found) - limit)[len(found) - limit]
            found = found[scores[found] >= least]
        order = np.lexsort((self._rank_of_id[found], -scores[found]))
        return [self._ids[row] for row in found[order][:limit]]

    def _scored(
        self, rows: array[int], counts: array[int], penalty: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """The score of each product that has the word."""
        num, having = len(self._ids), len(rows)
        rarity = np.log(1 + (num - having + 0.5) / (having + 0.5))
        where, times = np.array(rows, dtype=np.int32), np.array(counts, dtype=np.float64)
        return where, rarity * times * (_K1 + 1) / (times + penalty[where])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _text(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join((product.title, product.description, *product.bullet_points[:1], options))


def task_problems(gateway: WorldsSections, asked: Iterable[AskedTasks]) -> Iterator[str]:
    """A line for each dataset that asks for goals which the file does not have."""
    path = gateway.webshop.goals
    if path is not None and path.is_file():
        number = len(read_goals(path)[0])
        for one in asked:
            if beyond := one.outside(number):
                yield f"envgateway.webshop.goals ({path.absolute()}) holds {number} goals; {beyond}"
