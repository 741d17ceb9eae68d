"""The environment ``webshop`` over gRPC on a made catalogue: dialogue, turns, refusals, wiring."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from extras.worlds import webshop_pages as world_module
from extras.worlds.settings import WebshopConfig
from extras.worlds.tests.webshop_made import GOAL, write_catalogue
from extras.worlds.webshop_pages import WebshopWorld
from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import (
    CapacityError,
    ConfigError,
    DatasetError,
    InvalidRequestError,
    UnknownEnvironmentError,
)
from services.envgateway.envs.base import EndStatus
from services.envgateway.envs.episodes import make_worlds
from tests.integration.envgateway.environments.serving import Client, registry, served_world
from tests.waiting import accepted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_catalogue(tmp_path)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with served_world("webshop", WebshopWorld(WebshopConfig(data=folder, max_turns=4))) as serving:
        yield serving


def _say(action: str) -> str:
    return f"Thought:\nI think so.\n\nAction:\n{action}"


async def test_a_dialogue_from_the_rules_to_the_purchase(client: Client) -> None:
    start = await client.create("webshop", {"goal": GOAL})
    assert start.observation.startswith("You are shopping") and "click[Buy Now]" in start.observation
    assert start.observation.endswith("Available Actions:\n{'has_search_bar': True, 'clickables': ['search']}")
    assert GOAL["instruction_text"] in start.observation
    assert [message.role for message in start.messages] == ["user", "assistant"] * 5 + ["user"]
    assert "\n\n".join(message.content for message in start.messages) == start.observation
    page = await client.step(start.episode_id, 1, _say("search[stone mug]"))
    assert page.observation.startswith("Observation:\nInstruction: [SEP] ") and "B00000000A" in page.observation
    page = await client.step(start.episode_id, 2, "action: click[b00000000a] or click[back to search]")
    assert "click[navy blue]" in page.admissible_actions
    page = await client.step(start.episode_id, 3, _say("click[navy blue]"))
    end = await client.step(start.episode_id, 4, _say("click[Buy Now]"))
    assert (end.done, end.reward, end.metrics["r_option"]) == (True, 1.0, 1.0)


async def test_a_reply_without_an_action_ends_it_and_so_does_the_last_turn(client: Client) -> None:
    episode = (await client.create("webshop", {"index": 0})).episode_id
    end = await client.step(episode, 1, "I would rather not.")
    assert (end.done, end.reward, end.metrics["unparsed_actions"]) == (True, 0.0, 1.0)
    episode = (await client.create("webshop", {"index": 1})).episode_id
    assert [(await client.step(episode, n, _say("click[x]"))).done for n in range(1, 5)] == [False] * 3 + [True]
    task = {"index": 1, "environment": {"max_turns": 1, "style": "bare", "observation": "url"}}
    start = await client.create("webshop", task)
    assert start.observation == "http://127.0.0.1:3000/1"
    assert (await client.step(start.episode_id, 1, "search[a b]")).done


async def test_pages_look_as_the_config_says_unless_the_row_says_otherwise(folder: Path) -> None:
    world = WebshopWorld(WebshopConfig(data=folder, observation="text_rich"))
    rich = await world.build().reset({"index": 0}, 0)
    assert "[button] Search [button_]" in rich.messages[-1]["content"]
    plain = await world.build().reset({"index": 0, "environment": {"observation": "text"}}, 0)
    assert "[SEP] Search" in plain.messages[-1]["content"]
    await world.close()


async def test_the_status_of_an_end_is_in_agentbenchs_words(folder: Path) -> None:
    world = WebshopWorld(WebshopConfig(data=folder))

    async def end(reply: str, **settings: Any) -> str:
        environment = world.build()
        await environment.reset({"index": 0, "environment": settings}, 0)
        return environment.step(reply).status

    assert await end("no") == EndStatus.VALIDATION_FAILED
    assert await end(_say("click[x]")) == ""
    assert await end(_say("click[x]"), max_turns=1) == EndStatus.TURN_LIMIT
    observation = await world.build().reset({"index": 0}, 0)
    assert [message["role"] for message in observation.messages] == ["user", "assistant"] * 5 + ["user"]
    await world.close()


async def test_a_row_without_a_goal_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"holds 2 goals, .* asks for index 12086"):
        await client.create("webshop", {"index": 12_086})
    for task in ({}, {"index": 2}, {"index": -1}, {"index": "0"}, {"index": True}, {"goal": {}}):
        with pytest.raises(InvalidRequestError):
            await client.create("webshop", task)


async def test_an_unreadable_catalogue_is_an_error_for_each_caller_and_can_be_repaired(folder: Path) -> None:
    good = (folder / "items_human_ins.json").read_text()
    (folder / "items_human_ins.json").write_text("{}")
    async with served_world("webshop", WebshopWorld(WebshopConfig(data=folder))) as client:
        for _ in range(2):
            with pytest.raises(DatasetError, match="no goals"):
                await client.create("webshop", {"index": 0})
        (folder / "items_human_ins.json").write_text(good)
        starts = await asyncio.gather(*(client.create("webshop", {"index": 0}) for _ in range(20)))
        assert len({start.episode_id for start in starts}) == 20


async def test_a_catalogue_that_takes_long_asks_its_clients_to_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "_OPEN_TIMEOUT_S", 0.05)
    read = threading.Event()
    open_shop = world_module.open_shop

    def slowly(*arguments: Any) -> Any:
        read.wait(60)
        return open_shop(*arguments)

    monkeypatch.setattr(world_module, "open_shop", slowly)
    async with served_world("webshop", WebshopWorld(WebshopConfig(data=folder))) as client:
        with pytest.raises(CapacityError, match="still being opened") as told:
            await client.create("webshop", {"index": 0})
        assert told.value.retry_after_s
        read.set()
        assert (await accepted(lambda: client.create("webshop", {"index": 0}), CapacityError)).episode_id


async def test_a_gateway_offers_it_when_it_has_a_catalogue_and_else_says_how(folder: Path) -> None:
    offered = registry(make_worlds(EnvGatewayConfig(webshop=WebshopConfig(data=folder))))
    assert "webshop" in offered.names
    await offered.close()
    missing = registry(make_worlds(EnvGatewayConfig()))
    assert "webshop" not in missing.names
    with pytest.raises(UnknownEnvironmentError, match=r"envgateway\.webshop\.data"):
        missing.build("webshop")
    with pytest.raises(ConfigError, match="goals"):
        make_worlds(EnvGatewayConfig(webshop=WebshopConfig(data=folder, goals=folder / "none.json")))


@pytest.mark.needs("spacy")
def test_spacy_tags_nouns_when_it_is_asked_to(tmp_path: Path) -> None:
    import spacy

    parser = spacy.blank("en")
    ruler = parser.add_pipe("attribute_ruler")
    ruler.add([[{"LOWER": "mug"}]], {"POS": "NOUN"})
    ruler.add([[{"LOWER": "acme"}]], {"POS": "PROPN"})
    ruler.add([[{"LOWER": "stone"}]], {"POS": "ADJ"})
    parser.to_disk(tmp_path / "model")
    from extras.worlds.webshop_pages import tagger_of

    assert tagger_of(str(tmp_path / "model"))("Acme Stone Mug") == ("acme", "mug")
    with pytest.raises(ConfigError, match="tagger: run `python -m spacy download no_such_model`"):
        tagger_of("no_such_model")
