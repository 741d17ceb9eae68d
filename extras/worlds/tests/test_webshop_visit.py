"""Pages, clicks and rewards on the made catalogue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.worlds.tests.webshop_made import GOAL, write_catalogue
from extras.worlds.webshop import find_files, goal_of, read_catalogue
from extras.worlds.webshop_pages import (
    PageKind,
    Shop,
    Visit,
    every_word,
    judge_purchase,
    open_shop,
)
from services.common.errors import DatasetError


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = write_catalogue(tmp_path_factory.mktemp("catalogue"))
    return open_shop(find_files(folder), None, 233, every_word)


def _visit(shop: Shop, *actions: str, **goal: Any) -> Visit:
    visit = Visit(shop, goal_of({**GOAL, **goal}), "0")
    for action in actions:
        visit.act(action)
    return visit


def test_from_search_to_purchase(shop: Shop) -> None:
    visit = _visit(shop, "search[Stone Mug]")
    assert visit.page.clickables == ["back to search", "next >", "b00000000a", "b00000000b"]
    visit.act("click[B00000000A]")
    assert visit.page.clickables[-3:] == ["navy blue", "red | white", "large"]
    visit.act("click[navy blue]")
    visit.act("click[large]")
    assert visit.page.text_rich(visit.visited).startswith("You have clicked large.\nYou have clicked navy blue.\n")
    visit.act("click[Buy Now]")
    assert visit.purchase is not None and visit.purchase[0] == 1.0 and visit.page.kind is PageKind.DONE
    assert '{"color": "navy blue", "size": "large"}' in visit.page.text()
    visit.act("search[mug]")
    assert visit.page.kind is PageKind.DONE


def test_an_invalid_action_has_no_effect(shop: Shop) -> None:
    visit = _visit(shop, "search[mug]")
    page = visit.page
    for nothing in ("", "search", "search[]", "Search[lamp]", " click[b00000000a]", "click[b00000000z]", "go[x]"):
        visit.act(nothing)
        assert visit.page is page
    assert _visit(shop, "click[search]").page.kind is PageKind.START


def _purchase(
    shop: Shop, product_id: str, options: dict[str, str] | None = None, price: float = 10.0, **goal: Any
) -> Any:
    reward, parts = judge_purchase(
        shop.product(product_id), goal_of({**GOAL, **goal}), price, options or {}, every_word
    )
    return SimpleNamespace(reward=reward, **parts)


def test_parts_of_the_reward(shop: Shop) -> None:
    whole = _purchase(shop, "B00000000A", {"color": "navy blue"})
    assert (whole.reward, whole.r_type, whole.r_att, whole.r_option, whole.r_price) == (1.0, 1.0, 1.0, 1.0, True)
    assert _purchase(shop, "B00000000A").reward == pytest.approx(2 / 3)
    assert _purchase(shop, "B00000000A", price=20.01).reward == pytest.approx(1 / 3)
    assert _purchase(shop, "B00000000A", price=20.0).r_price
    none = _purchase(shop, "B00000000A", goal_options=[])
    assert none.reward == 1.0 and not hasattr(none, "r_option") and not hasattr(none, "w_option")


def test_attributes_are_found_in_likeness_and_in_texts(shop: Shop) -> None:
    for attribute in ("lead free", "free of lead", "stone", "dishwasher", "for tea"):
        assert _purchase(shop, "B00000000A", attributes=[attribute]).r_att == 1.0
    assert _purchase(shop, "B00000000A", attributes=["waterproof", "hand made"]).r_att == 0.5


@pytest.mark.parametrize(
    ("wanted", "chosen", "is_met"),
    [
        ("navy blue", "blue", True),
        ("dark navy blue", "blue", True),
        ("navy", "blue", False),
        ("large", "x-large", True),
        (["large"], "small", False),
    ],
)
def test_options_are_compared_by_color_or_likeness(shop: Shop, wanted: Any, chosen: str, is_met: bool) -> None:
    options = wanted if isinstance(wanted, list) else [wanted]
    assert (_purchase(shop, "B00000000A", {"o": chosen}, goal_options=options).r_option == 1.0) is is_met


def test_another_kind_of_product_is_worth_little(shop: Shop) -> None:
    unlike = _purchase(shop, "B00000000C", attributes=["warm light"], goal_options=[])
    assert (unlike.r_type, unlike.title_score, unlike.reward, unlike.r_att) == (0.0, 0.0, 0.0, 1.0)
    some = _purchase(shop, "B00000000C", name="a b c d Halden", goal_options=[], attributes=["warm light"])
    assert (some.r_type, some.title_score) == (0.5, 0.2)
    faint = _purchase(shop, "B00000000C", name="a b c d e f g h i j Halden", goal_options=[])
    assert faint.r_type == 0.1
    assert _purchase(shop, "B00000000C", name="123").r_type == 0.5  # no noun at all


def test_a_shop_without_goals_or_prices_is_refused(tmp_path: Path, shop: Shop) -> None:
    folder = write_catalogue(tmp_path)
    (folder / "items_human_ins.json").write_text("{}")
    with pytest.raises(DatasetError, match="no goals"):
        open_shop(find_files(folder), None, 1, every_word)
    products = read_catalogue(find_files(folder))[0]
    with pytest.raises(DatasetError, match="has no price"):
        Shop(products, {}, shop.goals, every_word)


@given(st.lists(st.sampled_from(["search[mug]", "search[cup]", "0", "1", "2", "3", "4", "5", "nonsense"]), max_size=12))
def test_any_walk_ends_in_a_page_and_a_reward_between_0_and_1(shop: Shop, walk: list[str]) -> None:
    visit = _visit(shop)
    for step in walk:
        clickables = visit.page.clickables
        visit.act(f"click[{clickables[int(step) % len(clickables)]}]" if step.isdigit() and clickables else step)
        assert visit.page.text() and visit.page.url.startswith("http")
    if visit.purchase is not None:
        assert 0 <= visit.purchase[0] <= 1 and visit.page.clickables == []
