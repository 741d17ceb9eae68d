"""Products, prices and goals, from files that are good and files that are not."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.worlds.tests.webshop_made import GOAL, write_catalogue
from extras.worlds.webshop import (
    NO_LIMIT,
    Product,
    SearchIndex,
    draw_goals,
    draw_prices,
    find_files,
    goal_of,
    read_catalogue,
    read_goals,
)
from services.common.errors import ConfigError, DatasetError, InvalidRequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_catalogue(tmp_path)


def test_products_are_cleaned_as_webshop_cleans_them(folder: Path) -> None:
    products, instructions = read_catalogue(find_files(folder))
    mug, glass, lamp = (products[f"B00000000{letter}"] for letter in "ABC")
    assert len(products) == 15 and mug.title == "Acme Stone Mug"
    assert mug.options == {"color": ("navy blue", "red | white"), "size": ("large", "description")}
    assert (mug.query, mug.attributes, glass.attributes) == ("mugs", ("hand made", "lead free"), ("DUMMY_ATTR",))
    assert (mug.prices, glass.prices, lamp.prices) == ((10.0,), (12.5, 20.0), (100.0,))
    assert (glass.price_tag, lamp.price_tag, glass.bullet_points) == ("$12.5 to $20.0", "$100.0", ("one text",))
    assert [wish.product_id for wish in instructions] == ["B00000000A", "B00000000B"]


def test_the_seed_decides_prices_limits_and_order(folder: Path) -> None:
    products, instructions = read_catalogue(find_files(folder))
    first, same, other = (draw_prices(products.values(), random.Random(seed)) for seed in (1, 1, 2))
    assert first == same and first["B00000000B"] != other["B00000000B"]
    assert 12.5 <= first["B00000000B"] <= 20 and first["B00000000C"] == 100
    for seed in range(20):
        goals = draw_goals(instructions, first, seed)
        assert goals == draw_goals(instructions, first, seed)
        for goal in goals:
            price = first[goal.product_id]
            assert price < goal.price_limit <= price // 10 * 10 + 40 and goal.price_limit % 10 == 0
            assert goal.instruction.endswith(f", and price lower than {goal.price_limit:.2f} dollars")
            assert ".," not in goal.instruction
    assert len({draw_goals(instructions, first, seed)[0].price_limit for seed in range(20)}) == 3


def test_a_product_above_every_price_limit_has_no_limit(folder: Path) -> None:
    products, instructions = read_catalogue(find_files(folder))
    prices = dict.fromkeys(products, 985.0)
    assert {(g.price_limit, "price" in g.instruction) for g in draw_goals(instructions, prices, 1)} == {
        (NO_LIMIT, False)
    }


def test_goals_are_read_from_a_file_and_from_a_row(tmp_path: Path) -> None:
    path = tmp_path / "goals.json"
    path.write_text(json.dumps({"goals": [GOAL], "prices": {"B00000000A": 7}}))
    assert read_goals(path) == ((goal_of(GOAL),), {"B00000000A": 7.0})
    assert goal_of({**GOAL, "goal_options": {"color": "navy"}}).options == (("color", "navy"),)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"price_upper": 0}, "above 0"),
        ({"attributes": []}, "at least one attribute"),
        ({"goal_options": None}, "no goal"),
        ({"price_upper": "cheap"}, "no goal"),
    ],
)
def test_a_goal_that_cannot_be_judged_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        goal_of({**GOAL, **change})
    path = tmp_path / "goals.json"
    path.write_text(json.dumps({"goals": [GOAL, {**GOAL, **change}], "prices": {}}))
    with pytest.raises(DatasetError, match=f"goal 1: .*{why}"):
        read_goals(path)


def test_files_that_are_missing_or_no_catalogue_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        find_files(folder / "nowhere")
    (folder / "items_shuffle_7.json").write_text("[]")
    with pytest.raises(ConfigError, match="several of items_shuffle"):
        find_files(folder)
    (folder / "items_shuffle.json").write_text('[{"asin": "B1"}]')
    with pytest.raises(DatasetError, match=r"items_shuffle\.json: product 0: KeyError"):
        read_catalogue(find_files(folder))
    (folder / "items_shuffle.json").write_text("{}")
    with pytest.raises(DatasetError, match="no JSON array"):
        read_catalogue(find_files(folder))
    (folder / "items_shuffle.json").write_text("nonsense")
    with pytest.raises(DatasetError, match=r"items_shuffle\.json"):
        read_catalogue(find_files(folder))
    (folder / "items_human_ins.json").unlink()
    with pytest.raises(ConfigError, match=r"no items_human_ins\.json"):
        find_files(folder)


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
