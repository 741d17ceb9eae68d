"""WebShop's reward for a purchase: how much of the goal the bought product, its options and its price meet.

reward = type * (attributes met + options met + price met) / (attributes + options + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from services.envgateway.envs.webshop.catalogue import Product
from services.envgateway.envs.webshop.colors import COLORS
from services.envgateway.envs.webshop.goals import Goal, Option
from services.envgateway.envs.webshop.nouns import Tagger

_ALIKE = 85  # more than this of 100
_NO_NOUNS = 0.2
_NOT_ASCII = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """The reward and its parts, named as WebShop's log names them."""

    reward: float
    r_type: float
    r_att: float
    r_option: float | None  # None: the goal has no options
    r_price: bool
    w_att: float
    w_option: float | None
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float

    def metrics(self) -> dict[str, float]:
        """The parts as numbers; those that the goal does not have are left out."""
        names = [name for name in self.__slots__ if name != "reward"]
        return {name: float(value) for name in names if (value := getattr(self, name)) is not None}


def judge_purchase(product: Product, goal: Goal, price: float, options: Mapping[str, str], nouns: Tagger) -> Purchase:
    """``options`` are those chosen, by name; ``price`` is in dollars."""
    query_match = product.query == goal.query
    category_match = len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
    title_score = _title_score(nouns(product.title), nouns(goal.name))
    r_type = _type_reward(query_match or category_match, title_score)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = sum(_is_chosen(option, options) for option in goal.options)
    r_price = price <= goal.price_limit
    parts = len(goal.attributes) + len(goal.options) + 1
    return Purchase(
        reward=(attributes + chosen + r_price) / parts * r_type,
        r_type=r_type,
        r_att=attributes / len(goal.attributes),
        r_option=chosen / len(goal.options) if goal.options else None,
        r_price=r_price,
        w_att=len(goal.attributes) / parts,
        w_option=len(goal.options) / parts if goal.options else None,
        w_price=1 / parts,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def _type_reward(same_kind: bool, title_score: float) -> float:
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    return 1.0 if same_kind or title_score > 0.2 else 0.5


def _title_score(bought: tuple[str, ...], wanted: tuple[str, ...]) -> float:
    return len({*bought} & {*wanted}) / len(wanted) if wanted else _NO_NOUNS


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, attribute: str) -> bool:
    return (
        any(_alike(own, attribute) for own in product.attributes)
        or attribute in product.title.lower()
        or attribute in " ".join(product.bullet_points).lower()
        or attribute in product.description.lower()
    )


def _is_chosen(option: Option, options: Mapping[str, str]) -> bool:
    wanted = _color_or_all(option)
    return any(_alike(_color_or_all(value), wanted) for value in options.values())


def _color_or_all(option: Option) -> str:
    """The first color word in the list's order: inside a value, but as a whole in a pair of name and value, as in
    WebShop. Without one, everything."""
    everything = option if isinstance(option, str) else " ".join(option)
    return next((color for color in COLORS if color in option), everything)


def _alike(one: str, other: str) -> bool:
    return round(token_set_ratio(_plain(one), _plain(other))) > _ALIKE


def _plain(text: str) -> str:
    return default_process(text.translate(_NOT_ASCII))
