"""WebShop's pages as pieces of text, and the text that a policy sees.

``text`` joins the pieces; ``text_rich`` marks buttons and clicked values. A piece that has only spaces behaves as in
the HTML that WebShop reads back: gone with a line break, one space otherwise.
"""

from __future__ import annotations

import asyncio
import enum
import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import Field
from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from extras.worlds.messages import index_of, read_turns
from extras.worlds.settings import WebshopConfig, WebshopPage, WorldsSections
from extras.worlds.webshop import (
    Goal,
    Option,
    Product,
    SearchIndex,
    draw_goals,
    draw_prices,
    find_files,
    goal_of,
    read_catalogue,
    read_goals,
)
from services.common.config.base import Section
from services.common.errors import CapacityError, ConfigError, DatasetError
from services.common.installing import install
from services.envgateway.calls import THREADS
from services.envgateway.envs.base import EndStatus, Observation, StepResult, settings_of

BASE_URL = "http://127.0.0.1:3000"
SPACES = " \n\t\f\r"


class Button(enum.StrEnum):
    SEARCH = "Search"
    BACK = "Back to Search"
    NEXT = "Next >"
    PREVIOUS = "< Prev"
    BUY = "Buy Now"
    DESCRIPTION = "Description"
    FEATURES = "Features"
    REVIEWS = "Reviews"
    ATTRIBUTES = "Attributes"


SUB_PAGES = (Button.DESCRIPTION, Button.FEATURES, Button.REVIEWS, Button.ATTRIBUTES)


class PageKind(enum.Enum):
    START = enum.auto()
    RESULTS = enum.auto()
    ITEM = enum.auto()
    SUB_PAGE = enum.auto()
    DONE = enum.auto()


class PieceKind(enum.Enum):
    TEXT = enum.auto()
    BUTTON = enum.auto()
    PRODUCT = enum.auto()
    OPTION = enum.auto()


Piece = tuple[PieceKind, str]


@dataclass(frozen=True, slots=True)
class Page:
    kind: PageKind
    url: str
    pieces: tuple[Piece, ...]

    @property
    def has_search_bar(self) -> bool:
        return self.kind is PageKind.START

    @property
    def clickables(self) -> list[str]:
        """Buttons, then products, then options; each once."""
        return list(
            dict.fromkeys(
                text if kind is PieceKind.OPTION else text.lower()
                for wanted in (PieceKind.BUTTON, PieceKind.PRODUCT, PieceKind.OPTION)
                for kind, text in self.pieces
                if kind is wanted
            )
        )

    def text(self) -> str:
        return " [SEP] ".join(shown.strip() for _, text in self.pieces if (shown := _shown(text)))

    def text_rich(self, visited: Collection[str]) -> str:
        """``visited`` are product ids."""
        lines, clicked_first = [], ""
        for kind, text in self.pieces:
            shown = _shown(text)
            if not shown:
                continue
            if kind is not PieceKind.TEXT:
                is_clicked = text in visited if kind is PieceKind.PRODUCT else False
                if kind is PieceKind.OPTION and f'"{text}"' in self.url:
                    clicked_first = f"You have clicked {text}.\n{clicked_first}"
                    is_clicked = True
                before = {PieceKind.OPTION: "  ", PieceKind.PRODUCT: "\n"}.get(kind, "")
                mark = "clicked button" if is_clicked else "button"
                shown = f"{before}[{mark}] {text} [{mark}_]"
            lines.append(f"{shown}\n")
        return clicked_first + "".join(lines)


def _texts(*texts: str) -> list[Piece]:
    return [(PieceKind.TEXT, text) for text in texts]


def _buttons(*buttons: Button) -> list[Piece]:
    return [(PieceKind.BUTTON, button.value) for button in buttons]


def _shown(text: str) -> str:
    """The text of a piece after HTML; empty when HTML drops the piece."""
    if text.strip(SPACES):
        return text
    return " " if text and "\n" not in text else ""


# --- WebShop's reward for a purchase: how much of the goal the bought product, its options and its price meet.


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
        raise ConfigError(
            f"envgateway.webshop.tagger: {model} needs the package spacy: {install('webshop')}"
        ) from error
    try:
        parse: Any = spacy.load(model)
    except OSError as error:
        raise ConfigError(
            f"envgateway.webshop.tagger: run `python -m spacy download {model}`, or name a folder that holds a model: {error}"
        ) from error
    return lru_cache(_REMEMBERED)(lambda name: tuple(t.text.lower() for t in parse(name) if t.pos_ in _NOUNS))


def tagger_of(name: str) -> Tagger:
    return every_word if name == "words" else spacy_tagger(name)


_TEXTS = read_turns("webshop.txt")
COLORS = _TEXTS["COLORS"][0].split()  # in WebShop's order: the first word that a value contains represents the value


_ALIKE = 85  # more than this of 100
_NO_NOUNS = 0.2
_NOT_ASCII = dict.fromkeys(range(128, 256))


Purchase = tuple[float, dict[str, float]]  # the reward, and its parts, named as WebShop's log names them


def judge_purchase(product: Product, goal: Goal, price: float, options: Mapping[str, str], nouns: Tagger) -> Purchase:
    """``options`` are those chosen, by name; ``price`` is in dollars. Parts that the goal does not have are left out."""
    query_match = product.query == goal.query
    category_match = len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
    bought, wanted = {*nouns(product.title)}, nouns(goal.name)
    title_score = len(bought & {*wanted}) / len(wanted) if wanted else _NO_NOUNS
    r_type = _type_reward(query_match or category_match, title_score)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = sum(_is_chosen(option, options) for option in goal.options)
    r_price = float(price <= goal.price_limit)
    parts = len(goal.attributes) + len(goal.options) + 1
    told = {
        "r_type": r_type,
        "r_att": attributes / len(goal.attributes),
        "r_price": r_price,
        "w_att": len(goal.attributes) / parts,
        "w_price": 1 / parts,
        "query_match": float(query_match),
        "category_match": float(category_match),
        "title_score": title_score,
    }
    if goal.options:
        told |= {"r_option": chosen / len(goal.options), "w_option": len(goal.options) / parts}
    return (attributes + chosen + r_price) / parts * r_type, told


def _type_reward(same_kind: bool, title_score: float) -> float:
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    return 1.0 if same_kind or title_score > 0.2 else 0.5


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


# --- Immutable state that all visits share: products, prices, goals, search and the scoring of purchases.


log = structlog.get_logger()
_MOST_FOUND = 50


class Shop:
    def __init__(
        self, products: Mapping[str, Product], prices: Mapping[str, float], goals: tuple[Goal, ...], nouns: Tagger
    ) -> None:
        """``prices`` in dollars, by product id.

        Raises:
            DatasetError: there is no goal, or a product has no price.
        """
        if not goals:
            raise DatasetError("the shop has no goals: none of its products has an instruction with attributes")
        unpriced = next((product_id for product_id in products if product_id not in prices), None)
        if unpriced is not None:
            raise DatasetError(f"product {unpriced} has no price: the goals were made for another catalogue")
        self.goals = goals
        self._products = products
        self._ids = {product_id.lower(): product_id for product_id in products}
        self._prices = prices
        self._nouns = nouns
        self._index = SearchIndex(list(products.values()))

    def product(self, product_id: str) -> Product:
        return self._products[product_id]

    def id_of(self, lowered: str) -> str:
        """The product id of a clickable."""
        return self._ids[lowered]

    def find(self, words: str) -> list[str]:
        """Product ids, best first."""
        return self._index.find(words, _MOST_FOUND)

    def judge(self, product_id: str, goal: Goal, options: Mapping[str, str]) -> Purchase:
        return judge_purchase(self._products[product_id], goal, self._prices[product_id], options, self._nouns)


def open_shop(files: Sequence[Path], goals: Path | None, seed: int, nouns: Tagger) -> Shop:
    """Read and index everything: seconds to minutes, as large as the catalogue is.

    ``goals`` names a file of goals and prices; without one both are drawn with the seed. Raises ``DatasetError``.
    """
    products, instructions = read_catalogue(files)
    if goals is not None:
        wanted, prices = read_goals(goals)
    else:
        prices = draw_prices(products.values(), random.Random(f"prices {seed}"))
        wanted = draw_goals(instructions, prices, seed)
    shop = Shop(products, prices, wanted, nouns)
    log.info("webshop.opened", products=len(products), goals=len(shop.goals))
    return shop


# --- One visit to the shop: which page an action leads to.


_MOST_CHARS = 1000  # of an action: pages repeat the words of a search in their address
_RESULTS_PER_PAGE = 10


class Visit:
    """``page`` is what is seen now; after ``purchase`` no action has an effect."""

    def __init__(self, shop: Shop, goal: Goal, session: str) -> None:
        self._shop = shop
        self._goal = goal
        self._session = session
        self._words: list[str] = []  # of the search, and what it found
        self._found: list[str] = []
        self._number = 1  # of the page of results, from 1
        self._product_id = ""
        self._options: dict[str, str] = {}  # chosen, by name
        self.visited: set[str] = set()  # product ids
        self.purchase: Purchase | None = None
        self.page = self._start()

    def act(self, action: str) -> None:
        """``search[words]`` or ``click[value]``; any other text, a text of more than 1000 characters, and a click on an
        absent value change no state."""
        parts = _parts(action)
        if parts is None or self.purchase is not None:
            return
        verb, argument = parts[0], parts[1].lower()
        if verb == "search":  # WebShop takes one on any page
            self._words = argument.split(" ")
            self._found = self._shop.find(" ".join(self._words))
            self.page = self._results(1)
        elif verb == "click" and argument in self.page.clickables and argument != Button.SEARCH.lower():
            self.page = self._click(argument)

    def _click(self, name: str) -> Page:
        """Buttons go before options of the same name."""
        kind = self.page.kind
        if name == Button.BUY.lower():
            return self._buy()
        if name == Button.BACK.lower():
            return self._start()
        if name == Button.NEXT.lower() and kind is PageKind.RESULTS:
            return self._results(self._number + 1)
        if name == Button.PREVIOUS.lower():
            if kind is PageKind.SUB_PAGE:
                return self._item()
            return self._results(self._number - (kind is PageKind.RESULTS))
        for which in SUB_PAGES:
            if name == which.lower():
                return self._sub_page(which)
        if kind is PageKind.RESULTS:
            self._product_id = self._shop.id_of(name)
            self.visited.add(self._product_id)
        else:  # of several options that have the value, the last one's
            options = self._shop.product(self._product_id).options.items()
            self._options[[option for option, values in options if name in values][-1]] = name
        return self._item()

    def _page(self, kind: PageKind, path: str, pieces: Iterable[Piece]) -> Page:
        return Page(kind, f"{BASE_URL}/{path}", tuple(pieces))

    def _head(self) -> list[Piece]:
        return [*_texts("Instruction:", self._goal.instruction), *_buttons(Button.BACK)]

    def _start(self) -> Page:
        self._words, self._found, self._number, self._options = [], [], 1, {}
        self.visited.clear()
        pieces = [*_texts("WebShop", "Instruction: ", self._goal.instruction), *_buttons(Button.SEARCH)]
        return self._page(PageKind.START, self._session, pieces)

    def _results(self, number: int) -> Page:
        self._number, self._product_id, self._options = number, "", {}
        pieces = [*self._head(), *_texts(f"Page {number} (Total results: {len(self._found)})")]
        pieces += _buttons(Button.PREVIOUS, Button.NEXT) if number > 1 else _buttons(Button.NEXT)
        for product_id in self._found[(number - 1) * _RESULTS_PER_PAGE : number * _RESULTS_PER_PAGE]:
            product = self._shop.product(product_id)
            pieces += [(PieceKind.PRODUCT, product.id), *_texts(product.title, product.price_tag)]
        path = f"search_results/{self._session}/{'+'.join(self._words)}/{number}"
        return self._page(PageKind.RESULTS, path, pieces)

    def _item(self) -> Page:
        product = self._shop.product(self._product_id)
        pieces = [*self._head(), *_buttons(Button.PREVIOUS)]
        for name, values in product.options.items():
            pieces += [(PieceKind.TEXT, name), *((PieceKind.OPTION, value) for value in values)]
        pieces += _texts(product.title, f"Price: {product.price_tag}", "Rating: N.A.")
        pieces += _buttons(Button.DESCRIPTION, Button.FEATURES, Button.REVIEWS, Button.BUY)
        return self._page(PageKind.ITEM, f"item_page/{self._place()}/{json.dumps(self._options)}", pieces)

    def _sub_page(self, which: Button) -> Page:
        product = self._shop.product(self._product_id)
        about: tuple[str, ...] = ()  # a catalogue has no reviews
        if which is Button.DESCRIPTION:
            about = (product.description,)
        elif which is Button.FEATURES:
            about = tuple(f" {point}" for point in product.bullet_points)
        elif which is Button.ATTRIBUTES:
            listed = (f" {attribute}" for attribute in product.attributes)
            about = (*listed, product.category, product.query, product.product_category)
        pieces = [*self._head(), *_buttons(Button.PREVIOUS), *_texts(*about)]
        return self._page(PageKind.SUB_PAGE, f"item_sub_page/{self._place()}/{which}/{self._options}", pieces)

    def _place(self) -> str:
        return f"{self._session}/{self._product_id}/{'+'.join(self._words)}/{self._number}"

    def _buy(self) -> Page:
        """The last page: the bought product and the reward; WebShop's other fields are empty in its text mode."""
        self.purchase = self._shop.judge(self._product_id, self._goal, self._options)
        options = json.dumps(self._options, sort_keys=True)
        for character in "<>&'":
            options = options.replace(character, f"\\u{ord(character):04x}")
        pieces = _texts(
            "Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)",
            "Purchased", "asin", self._product_id, "options", options, "attrs", "None", "category", "None",
            "query", "None", "product category", "None", "Target", "asin", "options", "attrs", "price upper",
            "instuction text", "category", "product category", "query", "Goal ", "None", "Reward",  # sic
            "Your score (min 0.0, max 1.0)", str(self.purchase[0]), "Reward Details ", "None",
        )  # fmt: skip
        return self._page(PageKind.DONE, f"done/{self._session}/{self._product_id}/{self._options}", pieces)


def _parts(action: str) -> tuple[str, str] | None:
    """The text before the last opening bracket, and between that bracket and the last closing one, on the first line;
    both not empty."""
    line = action[: _MOST_CHARS + 1].partition("\n")[0]
    if len(line) > _MOST_CHARS:
        return None
    closed = line.rfind("]")
    opened = line.rfind("[", 1, max(closed - 1, 0))
    return (line[:opened], line[opened + 1 : closed]) if opened >= 1 else None


# --- Converts a visit to messages for the policy, and a reply to an action.


Style = Literal["agentbench", "bare"]

# No part of the pattern backtracks: a reply of many spaces or of many beginnings is read once.
_BEGINNING = re.compile(r"[Aa]ction: *+\n*+ *+((?:search|click)\[)")
OPENING: tuple[Mapping[str, str], ...] = tuple(
    {"role": "assistant" if place % 2 else "user", "content": turn.rstrip("\n")}
    for place, turn in enumerate(_TEXTS["OPENING"])  # the rules, and an example
)


def shown(visit: Visit, style: Style, mode: WebshopPage) -> str:
    """The next message to the policy."""
    page = visit.page
    if mode == "text":
        observation = page.text()
    else:
        observation = page.url if mode == "url" else page.text_rich(visit.visited)
    if style == "bare":
        return observation
    available = {"has_search_bar": page.has_search_bar, "clickables": page.clickables}
    return f"Observation:\n{observation}\n\nAvailable Actions:\n{available}"


def action_of(reply: str, style: Style) -> str | None:
    """None: the reply names no action."""
    if style == "bare":
        return reply
    return _bracketed(reply)


def _bracketed(reply: str) -> str | None:
    """The first ``search[...]`` or ``click[...]`` after an announcement, closed on its line and not empty."""
    open_until = 0  # no bracket closes before: many beginnings on one line search for one once
    for begins in _BEGINNING.finditer(reply):
        if begins.end() + 1 < open_until:
            continue
        line_end = reply.find("\n", begins.end())
        open_until = len(reply) if line_end < 0 else line_end
        closed = reply.find("]", begins.end() + 1, open_until)
        if closed >= 0:
            return reply[begins.start(1) : closed + 1]
    return None


def admissible(visit: Visit) -> list[str]:
    """Every click, and the form of a search where there is a search bar."""
    page = visit.page
    if page.has_search_bar:
        return ["search[keywords]"]
    return [f"click[{value}]" for value in page.clickables]


# --- One episode of ``webshop``: a visit, talked about, within so many turns.


class WebshopSettings(Section):
    style: Style = "agentbench"
    """Form of the messages: AgentBench's dialogue with rules and an example, or pages and actions alone (`bare`)."""
    observation: WebshopPage | None = None
    """How a page is shown; left out, `envgateway.webshop.observation`."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of the episode; left out, `envgateway.webshop.max_turns`."""


class WebshopEnvironment:
    """WebShop as an environment. ``reset`` waits for the shop; ``step`` is a plain function, so searches run in a
    thread."""

    def __init__(self, owner: WebshopWorld, config: WebshopConfig) -> None:
        self._owner = owner
        self._max_turns = config.max_turns
        self._style: Style = "agentbench"
        self._page: WebshopPage = config.observation
        self._visit: Visit | None = None
        self._turns = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        settings = settings_of(task, WebshopSettings)
        goal, session = _goal_of(task, await self._owner.shop())
        self._visit = Visit(await self._owner.shop(), goal, session)
        self._max_turns = settings.max_turns or self._max_turns
        self._style = settings.style
        self._page = settings.observation or self._page
        text = shown(self._visit, self._style, self._page)
        if self._style == "bare":
            return Observation(text=text, admissible_actions=admissible(self._visit))
        messages = (*OPENING, {"role": "user", "content": text})
        return Observation(
            text="\n\n".join(message["content"] for message in messages),
            admissible_actions=admissible(self._visit),
            messages=messages,
        )

    def step(self, action: str) -> StepResult:
        assert self._visit is not None, "step before reset"
        chosen = action_of(action, self._style)
        self._turns += 1
        if chosen is None:
            return StepResult(done=True, status=EndStatus.VALIDATION_FAILED, metrics={"unparsed_actions": 1.0})
        self._visit.act(chosen)
        text = shown(self._visit, self._style, self._page)
        if self._visit.purchase is not None:
            reward, parts = self._visit.purchase
            return StepResult(observation=text, reward=reward, done=True, metrics=parts, status=EndStatus.COMPLETED)
        at_end = self._turns >= self._max_turns
        return StepResult(
            observation=text,
            done=at_end,
            admissible_actions=admissible(self._visit),
            status=EndStatus.TURN_LIMIT if at_end else "",
        )

    def close(self) -> None:
        self._visit = None


def _goal_of(task: Mapping[str, Any], shop: Shop) -> tuple[Goal, str]:
    """The goal, and the name of the session in URLs."""
    if isinstance(task.get("goal"), Mapping):
        return goal_of(task["goal"]), str(task.get("index", "own"))
    index = index_of(task, len(shop.goals), f"the shop holds {len(shop.goals)} goals")
    return shop.goals[index], str(index)


_OPEN_TIMEOUT_S = 20.0
_SEED = 233  # of prices, price limits and the order of goals: WebShop's
_COME_BACK_S = 5.0


class WebshopWorld:
    """One shop for all episodes, opened by the first."""

    is_indexed = True

    def __init__(self, config: WebshopConfig, tagger: Tagger | None = None) -> None:
        """``tagger`` instead of the config's. Raises ``ConfigError`` when a file is not there."""
        if config.data is None:
            raise ConfigError("envgateway.webshop.data names no folder")
        if config.goals is not None and not config.goals.is_file():
            raise ConfigError(f"envgateway.webshop.goals: there is no file {config.goals.absolute()}")
        self._files = find_files(config.data)
        self._config = config
        self._tagger = tagger or tagger_of(config.tagger)
        self._opening: asyncio.Task[Shop] | None = None

    def build(self) -> WebshopEnvironment:
        return WebshopEnvironment(self, self._config)

    async def shop(self) -> Shop:
        """Opened once, in a thread that outlives a caller that gives up. A failure is raised, and the next call tries
        again.

        Raises ``CapacityError`` while a large catalogue is still being read: come back.
        """
        if self._opening is None or (self._opening.done() and not _succeeded(self._opening)):
            config = self._config
            opening = THREADS.run(open_shop, self._files, config.goals, _SEED, self._tagger)
            self._opening = asyncio.create_task(opening, name="open the shop")
        opened, _ = await asyncio.wait([self._opening], timeout=_OPEN_TIMEOUT_S)
        if not opened:
            raise CapacityError("the shop is still being opened", retry_after_s=_COME_BACK_S)
        return self._opening.result()

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            _succeeded(self._opening)
            self._opening = None


def make_world(config: WorldsSections, sandbox: object) -> WebshopWorld | str:
    if config.webshop.data is None:
        return "write envgateway.webshop.data: FOLDER, which holds the catalogue in WebShop's raw form"
    return WebshopWorld(config.webshop)


def _succeeded(opening: asyncio.Task[Shop]) -> bool:
    return not opening.cancelled() and opening.exception() is None
