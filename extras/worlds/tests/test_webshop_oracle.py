"""WebShop's own answers on an invented catalogue, asked of ours over gRPC: rewards, pages, clickables, the end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from extras.worlds.settings import WebshopConfig
from extras.worlds.webshop_pages import WebshopWorld
from services.common.errors import InvalidRequestError
from services.common.pb import environment_pb2 as pb
from tests import needs
from tests.integration.envgateway.environments.serving import Client, served_world

FREE = {"style": "bare", "max_turns": 100}


@pytest.fixture(scope="module")
def data(data_root: Path) -> Path:
    needs.check("made WebShop catalogue")
    return data_root / "webshop_made"


@pytest.fixture
async def client(data: Path) -> AsyncIterator[Client]:
    world = WebshopWorld(WebshopConfig(data=data, goals=data / "oracle-goals.json"))
    async with served_world("webshop", world) as serving:
        yield serving


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _available(answer: pb.CreateEpisodeResponse | pb.StepEpisodeResponse) -> dict[str, Any]:
    actions = list(answer.admissible_actions)
    if actions == ["search[keywords]"]:
        return {"has_search_bar": True, "clickables": ["search"]}
    return {"has_search_bar": False, "clickables": [re.fullmatch(r"click\[(.*)\]", a)[1] for a in actions]}  # type: ignore[index]


@pytest.mark.parametrize("mode", ["text", "text_rich", "url"])
async def test_every_page_reward_and_end_equals_the_real_environments(client: Client, data: Path, mode: str) -> None:
    episodes = _lines(data / "oracle-episodes.jsonl")
    assert len(episodes) == 12
    for wanted in episodes:
        task = {"index": wanted["goal_index"], "environment": {**FREE, "observation": mode}}
        start = await client.create("webshop", task)
        assert (start.observation, _available(start)) == (wanted["obs"][mode], wanted["available"])
        for turn, step in enumerate(wanted["steps"], 1):
            got = await client.step(start.episode_id, turn, step["action"])
            assert (got.observation, got.reward, got.done) == (step["obs"][mode], step["reward"], step["done"])
            assert _available(got) == step["available"]
        parts = {name: float(value) for name, value in (wanted["verbose"] or {}).items()}
        assert dict(got.metrics) == parts


async def test_every_purchase_has_the_real_reward_functions_value(client: Client, data: Path) -> None:
    vectors = _lines(data / "oracle-rewards.jsonl")
    assert len(vectors) == 60
    raised = 0
    for wanted in vectors:
        task = {"goal": wanted["goal"], "environment": FREE}
        if wanted["reward"] is None:
            with pytest.raises(InvalidRequestError, match="price limit must be above 0"):
                await client.create("webshop", task)
            raised += 1
            continue
        end = await _buy(client, task, wanted["product"], wanted["options"])
        assert (end.done, end.reward) == (True, wanted["reward"])
        assert dict(end.metrics) == {name: float(value) for name, value in wanted["info"].items()}
    assert raised == 2


async def _buy(client: Client, task: Any, product: Any, options: dict[str, str]) -> pb.StepEpisodeResponse:
    """Search for a product by its title, page to it, choose and buy."""
    episode = (await client.create("webshop", task)).episode_id
    turn, click = 1, f"click[{product['asin'].lower()}]"
    page = await client.step(episode, turn, f"search[{product['Title']}]")
    while click not in page.admissible_actions:
        turn += 1
        page = await client.step(episode, turn, "click[next >]")
        assert turn < 7, "not found"
    for action in (click, *(f"click[{value}]" for value in options.values()), "click[Buy Now]"):
        turn += 1
        page = await client.step(episode, turn, action)
    return page


async def test_goals_that_are_drawn_have_the_order_and_the_wording_of_the_real_ones(data: Path) -> None:
    shop = await WebshopWorld(WebshopConfig(data=data)).shop()
    stored = json.loads((data / "oracle-goals.json").read_text(encoding="utf-8"))["goals"]
    assert [goal.product_id for goal in shop.goals] == [goal["asin"] for goal in stored]

    def without_limit(text: str) -> str:
        return re.sub(r", and price lower than [\d.]+ dollars$", "", text)

    assert [without_limit(goal.instruction) for goal in shop.goals] == [
        without_limit(goal["instruction_text"]) for goal in stored
    ]
