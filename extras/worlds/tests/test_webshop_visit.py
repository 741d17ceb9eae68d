"""Pages, clicks and rewards on the made catalogue."""

from __future__ import annotations

from pathlib import Path
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
