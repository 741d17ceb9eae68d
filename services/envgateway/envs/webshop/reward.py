"""WebShop's reward for a purchase: how much of the goal the bought product, its options and its price meet.

reward = type * (attributes met + options met + price met) / (attributes + options + 1)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from services.common.config.processes.environments import WebshopConfig
from services.common.errors import ConfigError
from services.common.installing import install
from services.envgateway.envs.webshop.catalogue import Product
from services.envgateway.envs.webshop.goals import Goal, Option

# Decides rewards: results are comparable only between runs with the same one.
Tagger = Callable[[str], tuple[str, ...]]  # a name -> its nouns, lower-cased, in order

_WORD = re.compile(r"[a-zA-Z]+")
_NOUNS = ("NOUN", "PROPN")
_REMEMBERED = 65536  # names; tagging one takes spaCy milliseconds


def every_word(name: str) -> tuple[str, ...]:
    """Replaces a tagger: all words made of letters."""
    return tuple(word.lower() for word in _WORD.findall(name))


def spacy_tagger(model: str) -> Tagger:
    """WebShop's own. Raises ``ConfigError`` when spaCy or the model is not installed."""
    try:
        import spacy
    except ImportError as error:
        raise ConfigError(f"envgateway.webshop.tagger: spacy needs the package spacy: {install('webshop')}") from error
    try:
        parse: Any = spacy.load(model)
    except OSError as error:
        raise ConfigError(
            f"envgateway.webshop.spacy_model: run `python -m spacy download {model}`, or name a folder that holds a model: {error}"
        ) from error
    return lru_cache(_REMEMBERED)(lambda name: tuple(t.text.lower() for t in parse(name) if t.pos_ in _NOUNS))


def tagger_of(config: WebshopConfig) -> Tagger:
    return every_word if config.tagger == "words" else spacy_tagger(config.spacy_model)


# In WebShop's order: the first word that a value contains represents the value.
COLORS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
    seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
    wine yellow
    """.split()  # noqa: SIM905 - a hundred quoted words are harder to read
)


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
