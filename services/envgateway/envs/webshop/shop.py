"""Immutable state that all visits share: products, prices, goals, search and the scoring of purchases."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.common.errors import DatasetError
from services.envgateway.envs.webshop.catalogue import CatalogueFiles, Product, draw_prices, read_catalogue
from services.envgateway.envs.webshop.goals import Goal, draw_goals, read_goals
from services.envgateway.envs.webshop.reward import Purchase, Tagger, judge_purchase
from services.envgateway.envs.webshop.search import SearchIndex

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

    def judge(self, product: Product, goal: Goal, options: Mapping[str, str]) -> Purchase:
        return judge_purchase(product, goal, self._prices[product.id], options, self._nouns)


def open_shop(files: CatalogueFiles, goals: Path | None, num_products: int | None, seed: int, nouns: Tagger) -> Shop:
    """Read and index everything: seconds to minutes, as large as the catalogue is.

    ``goals`` names a file of goals and prices; without one both are drawn with the seed. Raises ``DatasetError``.
    """
    catalogue = read_catalogue(files, num_products)
    if goals is not None:
        stored = read_goals(goals)
        shop = Shop(catalogue.products, stored.prices, stored.goals, nouns)
    else:
        prices = draw_prices(catalogue.products.values(), random.Random(f"prices {seed}"))
        drawn = draw_goals(catalogue.instructions, prices, seed)
        shop = Shop(catalogue.products, prices, drawn, nouns)
    log.info("webshop.opened", products=len(catalogue.products), goals=len(shop.goals))
    return shop
