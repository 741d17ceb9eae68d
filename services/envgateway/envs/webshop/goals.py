"""Goals of episodes: a product with a price limit, drawn from the instructions or read from a file.

The order of goals is that of WebShop for the same seed. Its prices and limits come from a generator that WebShop never
seeds, so they differ from run to run there; here the seed fixes them, or a file does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.common.errors import DatasetError, InvalidRequestError
from services.envgateway.envs.webshop.catalogue import Instruction

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


@dataclass(frozen=True, slots=True)
class StoredGoals:
    goals: tuple[Goal, ...]
    prices: Mapping[str, float]  # by product id


def draw_goals(instructions: Iterable[Instruction], prices: Mapping[str, float], seed: int) -> tuple[Goal, ...]:
    """One goal per instruction, limited and then shuffled by the seed."""
    draw = random.Random(f"limits {seed}")
    goals = [_limited(instruction, prices[instruction.product.id], draw) for instruction in instructions]
    random.Random(seed).shuffle(goals)
    return tuple(goals)


def read_goals(path: Path) -> StoredGoals:
    """``{"goals": [...], "prices": {id: dollars}}``. Raises ``DatasetError`` with the file and the row."""
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
    return StoredGoals(tuple(goals), prices)


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


def _limited(instruction: Instruction, price: float, draw: random.Random) -> Goal:
    choices = [limit for limit in _LIMITS if limit > price][:_CHOICES]
    limit, text = NO_LIMIT, instruction.text.strip(".")
    if len(choices) >= 2:
        limit = max(draw.sample(choices, 2))
        text += f", and price lower than {limit:.2f} dollars"
    product = instruction.product
    return Goal(
        product_id=product.id,
        name=product.title,
        query=product.query,
        product_category=product.product_category,
        instruction=text,
        attributes=instruction.attributes,
        options=instruction.options,
        price_limit=limit,
    )
