"""One visit to the shop: which page an action leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.envgateway.envs.webshop import pages
from services.envgateway.envs.webshop.goals import Goal
from services.envgateway.envs.webshop.pages import Button, Page, PageKind
from services.envgateway.envs.webshop.reward import Purchase
from services.envgateway.envs.webshop.shop import Shop

_MOST_CHARS = 1000  # of an action: pages repeat the words of a search in their address
_RESULTS_PER_PAGE = 10


@dataclass(slots=True)
class _Search:
    """The search words, the position in the results, and the product on display."""

    words: list[str]
    found: list[str]  # product ids
    page: int = 1
    product_id: str = ""


class Visit:
    """Begins on the start page, ends with a purchase. Not for two threads at once."""

    def __init__(self, shop: Shop, goal: Goal, session: str) -> None:
        self._shop = shop
        self._goal = goal
        self._session = session
        self._search = _Search([], [])
        self._options: dict[str, str] = {}
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
            words = argument.split(" ")
            self.page = self._results(_Search(words, self._shop.find(" ".join(words))), 1)
        elif verb == "click" and argument in self.page.clickables and argument != Button.SEARCH.lower():
            self.page = self._click(argument)

    def _click(self, name: str) -> Page:
        """Buttons go before options of the same name."""
        if name == Button.BUY.lower():
            return self._buy()
        if name == Button.BACK.lower():
            return self._start()
        turn_page: dict[tuple[str, PageKind], Callable[[], Page]] = {
            (Button.NEXT.lower(), PageKind.RESULTS): lambda: self._results(self._search, self._search.page + 1),
            (Button.PREVIOUS.lower(), PageKind.RESULTS): lambda: self._results(self._search, self._search.page - 1),
            (Button.PREVIOUS.lower(), PageKind.ITEM): lambda: self._results(self._search, self._search.page),
            (Button.PREVIOUS.lower(), PageKind.SUB_PAGE): self._item,
        }
        if (name, self.page.kind) in turn_page:
            return turn_page[name, self.page.kind]()
        for which in pages.SUB_PAGES:
            if name == which.lower():
                return self._sub_page(which)
        if self.page.kind is PageKind.RESULTS:
            self._search.product_id = self._shop.id_of(name)
            self.visited.add(self._search.product_id)
        else:
            self._choose(name)
        return self._item()

    def _choose(self, value: str) -> None:
        """Replaces the value of the same name; of several names that have the value, the last one's."""
        product = self._shop.product(self._search.product_id)
        name = [name for name, values in product.options.items() if value in values][-1]
        self._options[name] = value

    def _start(self) -> Page:
        self._search, self._options = _Search([], []), {}
        self.visited.clear()
        return pages.start_page(self._session, self._goal.instruction)

    def _results(self, search: _Search, number: int) -> Page:
        self._search, self._options = search, {}
        search.page, search.product_id = number, ""
        listed = search.found[(number - 1) * _RESULTS_PER_PAGE : number * _RESULTS_PER_PAGE]
        products = [self._shop.product(product_id) for product_id in listed]
        instruction = self._goal.instruction
        return pages.results_page(self._session, instruction, search.words, number, products, len(search.found))

    def _item(self) -> Page:
        search, product = self._search, self._shop.product(self._search.product_id)
        return pages.item_page(self._session, self._goal.instruction, search.words, search.page, product, self._options)

    def _sub_page(self, which: Button) -> Page:
        search, product = self._search, self._shop.product(self._search.product_id)
        return pages.sub_page(
            self._session, self._goal.instruction, search.words, search.page, product, self._options, which
        )

    def _buy(self) -> Page:
        product = self._shop.product(self._search.product_id)
        self.purchase = self._shop.judge(product, self._goal, self._options)
        return pages.done_page(self._session, product, self._options, self.purchase.reward)


def _parts(action: str) -> tuple[str, str] | None:
    """The text before the last opening bracket, and between that bracket and the last closing one, on the first line;
    both not empty."""
    line = action[: _MOST_CHARS + 1].partition("\n")[0]
    if len(line) > _MOST_CHARS:
        return None
    closed = line.rfind("]")
    opened = line.rfind("[", 1, max(closed - 1, 0))
    return (line[:opened], line[opened + 1 : closed]) if opened >= 1 else None
