"""WebShop's pages as pieces of text, and the text that a policy sees.

``text`` joins the pieces; ``text_rich`` marks buttons and clicked values. A piece that has only spaces behaves as in
the HTML that WebShop reads back: gone with a line break, one space otherwise.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.envgateway.envs.webshop.catalogue import Product

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
        of_kind = [
            *(text.lower() for kind, text in self.pieces if kind is PieceKind.BUTTON),
            *(text.lower() for kind, text in self.pieces if kind is PieceKind.PRODUCT),
            *(text for kind, text in self.pieces if kind is PieceKind.OPTION),
        ]
        return list(dict.fromkeys(of_kind))

    def text(self) -> str:
        return " [SEP] ".join(shown.strip() for _, text in self.pieces if (shown := _shown(text)))

    def text_rich(self, visited: Collection[str]) -> str:
        """``visited`` are product ids."""
        lines, clicked_first = [], ""
        for kind, text in self.pieces:
            shown = _shown(text)
            if not shown:
                continue
            if kind is PieceKind.OPTION and f'"{text}"' in self.url:
                clicked_first = f"You have clicked {text}.\n{clicked_first}"
                shown = f"  [clicked button] {text} [clicked button_]"
            elif kind is PieceKind.OPTION:
                shown = f"  [button] {text} [button_]"
            elif kind is PieceKind.PRODUCT and text in visited:
                shown = f"\n[clicked button] {text} [clicked button_]"
            elif kind is PieceKind.PRODUCT:
                shown = f"\n[button] {text} [button_]"
            elif kind is PieceKind.BUTTON:
                shown = f"[button] {text} [button_]"
            lines.append(f"{shown}\n")
        return clicked_first + "".join(lines)


def start_page(session: str, instruction: str) -> Page:
    pieces = [*_texts("WebShop", "Instruction: ", instruction), _button(Button.SEARCH)]
    return Page(PageKind.START, f"{BASE_URL}/{session}", tuple(pieces))


def results_page(
    session: str, instruction: str, words: Sequence[str], number: int, products: Iterable[Product], num_found: int
) -> Page:
    """``number`` counts from 1; ``products`` are those of this page."""
    pieces = [*_head(instruction), *_texts(f"Page {number} (Total results: {num_found})")]
    if number > 1:
        pieces.append(_button(Button.PREVIOUS))
    pieces.append(_button(Button.NEXT))
    for product in products:
        pieces += [(PieceKind.PRODUCT, product.id), *_texts(product.title, product.price_tag)]
    return Page(PageKind.RESULTS, f"{BASE_URL}/search_results/{session}/{'+'.join(words)}/{number}", tuple(pieces))


def item_page(
    session: str, instruction: str, words: Sequence[str], number: int, product: Product, chosen: Mapping[str, str]
) -> Page:
    pieces = [*_head(instruction), _button(Button.PREVIOUS)]
    for name, values in product.options.items():
        pieces += [(PieceKind.TEXT, name), *((PieceKind.OPTION, value) for value in values)]
    pieces += _texts(product.title, f"Price: {product.price_tag}", "Rating: N.A.")
    pieces += [_button(b) for b in (Button.DESCRIPTION, Button.FEATURES, Button.REVIEWS, Button.BUY)]
    path = f"item_page/{session}/{product.id}/{'+'.join(words)}/{number}/{json.dumps(chosen)}"
    return Page(PageKind.ITEM, f"{BASE_URL}/{path}", tuple(pieces))


def sub_page(
    session: str,
    instruction: str,
    words: Sequence[str],
    number: int,
    product: Product,
    chosen: Mapping[str, str],
    which: Button,
) -> Page:
    about: tuple[str, ...] = ()  # a catalogue has no reviews
    if which is Button.DESCRIPTION:
        about = (product.description,)
    elif which is Button.FEATURES:
        about = tuple(f" {point}" for point in product.bullet_points)
    elif which is Button.ATTRIBUTES:
        listed = (f" {attribute}" for attribute in product.attributes)
        about = (*listed, product.category, product.query, product.product_category)
    path = f"item_sub_page/{session}/{product.id}/{'+'.join(words)}/{number}/{which}/{dict(chosen)}"
    pieces = [*_head(instruction), _button(Button.PREVIOUS), *_texts(*about)]
    return Page(PageKind.SUB_PAGE, f"{BASE_URL}/{path}", tuple(pieces))


def done_page(session: str, product: Product, chosen: Mapping[str, str], reward: float) -> Page:
    """The last page: the bought product and the reward; WebShop's other fields are empty in its text mode."""
    options = json.dumps(dict(chosen), sort_keys=True)
    for character in "<>&'":
        options = options.replace(character, f"\\u{ord(character):04x}")
    pieces = _texts("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)")
    pieces += _texts("Purchased", "asin", product.id, "options", options, "attrs", "None", "category", "None")
    pieces += _texts("query", "None", "product category", "None", "Target", "asin", "options", "attrs", "price upper")
    pieces += _texts("instuction text", "category", "product category", "query", "Goal ", "None", "Reward")  # sic
    pieces += _texts("Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None")
    return Page(PageKind.DONE, f"{BASE_URL}/done/{session}/{product.id}/{dict(chosen)}", tuple(pieces))


def _head(instruction: str) -> list[Piece]:
    return [*_texts("Instruction:", instruction), _button(Button.BACK)]


def _texts(*texts: str) -> list[Piece]:
    return [(PieceKind.TEXT, text) for text in texts]


def _button(button: Button) -> Piece:
    return PieceKind.BUTTON, button.value


def _shown(text: str) -> str:
    """The text of a piece after HTML; empty when HTML drops the piece."""
    if text.strip(SPACES):
        return text
    return " " if text and "\n" not in text else ""
