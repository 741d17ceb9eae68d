"""BM25: order, ties, and words that no product has."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extras.worlds.webshop import Product, SearchIndex


def _product(number: int, title: str, **more: object) -> Product:
    plain: dict[str, object] = {
        "id": f"P{number}", "title": title, "query": "", "category": "", "product_category": "", "description": "",
        "bullet_points": (), "attributes": (), "options": {}, "prices": (1.0,),
    }  # fmt: skip
    return Product(**{**plain, **more})  # type: ignore[arg-type]


def test_all_indexed_texts_are_found_and_attributes_are_not() -> None:
    described = _product(
        1, "a", description="b", bullet_points=("c", "d"), options={"color": ("e",)}, attributes=("f",)
    )
    index = SearchIndex([described, _product(2, "other")])
    assert all(index.find(word, 5) == ["P1"] for word in ("A", "b!", "c", "color", "e"))
    assert index.find("d", 5) == index.find("f", 5) == index.find("", 5) == []


def test_equal_scores_are_ordered_by_id_and_cut_at_the_limit() -> None:
    index = SearchIndex([_product(n, "mug") for n in (3, 1, 2)] + [_product(9, "lamp")])
    assert index.find("mug", 5) == ["P1", "P2", "P3"] and index.find("mug", 2) == ["P1", "P2"]
    assert SearchIndex([]).find("mug", 5) == []


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcdefg"), max_size=4),
)
def test_scores_are_those_of_the_formula(documents: list[list[str]], query: list[str]) -> None:
    index = SearchIndex([_product(n, " ".join(words)) for n, words in enumerate(documents)])
    mean = sum(map(len, documents)) / len(documents)

    def score(words: list[str]) -> float:
        total = 0.0
        for word in query:
            having = sum(word in other for other in documents)
            count = Counter(words)[word]
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            total += rarity * count * 1.9 / (count + 0.9 * (0.6 + 0.4 * len(words) / mean))
        return round(total, 9)

    scores = {f"P{n}": score(words) for n, words in enumerate(documents)}
    found = index.find(" ".join(query), 50)
    assert [scores[name] for name in found] == sorted((s for s in scores.values() if s), reverse=True)
