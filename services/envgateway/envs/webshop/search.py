"""BM25 over a catalogue: which products a line of words finds, best first.

A product's text has the fields that WebShop indexes: title, description, first bullet point and options. Words are runs
of letters and digits, lower-cased; there is no stemming and there are no stop words. Equal scores are ordered by
product id.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.envgateway.envs.webshop.catalogue import Product

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
