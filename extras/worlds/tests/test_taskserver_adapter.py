"""The adapter protocol over HTTP: episodes by uuid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extras.worlds.tests.taskserver_scripted import ACTIONS, Http, task_server
from services.common.config.envgateway import ServedTaskConfig
from tests.waiting import until

SERVED = {
    "orders": ServedTaskConfig(concurrency=3, row={"extra": "more", "environment": {"max_turns": 7}}),
    "named": ServedTaskConfig(),
    "mine": ServedTaskConfig(environment="unlisted", end=3, first=1),
}


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with task_server(SERVED) as serving:
        yield serving


async def _start(http: Http, sample: object = 1, base: str = "/api", status: int = 200) -> Any:
    return await http.post(f"{base}/episode/start", {"sample_id": sample}, status)


async def _step(http: Http, episode: Any, content: str, status: int = 200) -> Any:
    body = {"episode_id": episode["episode_id"], "action": {"type": "text", "content": content}}
    return await http.post("/api/episode/step", body, status)


async def test_an_episode_from_start_to_end(http: Http) -> None:
    start = await _start(http, "1")
    assert start["observation"] == {
        "type": "messages",
        "content": [
            {"role": "user", "content": "rules"},
            {"role": "agent", "content": "Ok."},
            {"role": "user", "content": "task 1 of seed 1, more"},
        ],
    }
    assert (start["reward"], start["done"], start["info"]["status"]) == (0.0, False, "SampleStatus.RUNNING")
    assert (await http.get("/api/health"))["active_episodes"] == 1
    step = await _step(http, start, "hello")
    assert step["observation"] == {"type": "text", "content": "you said hello"}
    assert (step["reward"], step["done"], step["info"]["turn"]) == (0.0, False, 1)
    end = await _step(http, start, "win")
    assert (end["observation"], end["reward"], end["done"]) == (None, 1.0, True)
    assert end["info"] == {"turn": 2, "status": "SampleStatus.COMPLETED", "success": True, "metrics": {"wins": 1.0}}
    await _step(http, start, "win", status=404)
    assert await http.get("/api/health") == {"status": "healthy", "active_episodes": 0, "task_name": "orders"}


async def test_an_end_says_why(http: Http) -> None:
    lost = await _step(http, await _start(http), "lose")
    assert (lost["info"]["status"], lost["info"]["success"]) == ("SampleStatus.AGENT_VALIDATION_FAILED", False)
    limit = await _step(http, await _start(http), "limit")
    assert (limit["info"]["status"], limit["reward"]) == ("SampleStatus.TASK_LIMIT_REACHED", 0.25)


async def test_every_task_has_the_protocol_under_its_name(http: Http) -> None:
    info = await http.get("/api/task/info")
    assert (info["name"], info["num_samples"], info["max_episode_length"]) == ("orders", 6, 7)
    assert (await http.get("/api/named/task/info"))["num_samples"] == 2
    assert (await _start(http, "a", "/api/named"))["observation"]["content"][-1]["content"].startswith(
        "task a of seed 0"
    )
    assert (await http.get("/api/mine/task/info"))["num_samples"] == 2
    mine = await _start(http, 2, "/api/mine")
    assert mine["observation"]["content"] == [{"role": "user", "content": "2 2"}]
    assert (await _step(http, mine, "x"))["reward"] == 1.0
    await _start(http, 0, "/api/mine", status=404)
    await http.get("/api/nobody/health", status=404)


async def test_errors_have_the_status_codes_that_clients_know(http: Http) -> None:
    await _start(http, "one", status=400)
    await _start(http, 99, status=404)
    assert (await _start(http, 3, status=400))["detail"] == "nobody can play 3"
    assert "disk" in (await _start(http, 4, status=500))["detail"]
    refused = await http.post("/api/episode/start", {"sample": 1}, 422)
    assert refused["detail"][0]["loc"] == ["body", "sample_id"]
    await http.post("/api/episode/step", {"episode_id": "x", "action": {}}, 422)
    await http.post("/api/episode/step", {"episode_id": "x", "action": {"content": "y"}}, 404)
    await http.post("/api/episode/cancel", {"episode_id": "x"}, 404)
    assert (await http.get("/api/health"))["active_episodes"] == 0


async def test_two_steps_at_once_are_refused_and_the_first_goes_on(http: Http) -> None:
    start = await _start(http)
    ACTIONS.clear()
    first = asyncio.create_task(_step(http, start, "slow"))
    await until(lambda: "slow" in ACTIONS, "the first is being taken")
    assert "busy" in (await _step(http, start, "slow", status=409))["detail"]
    assert (await first)["info"]["turn"] == 1
    assert (await _step(http, start, "win"))["info"]["turn"] == 2


async def test_a_cancelled_episode_is_gone_and_frees_its_place(http: Http) -> None:
    episodes = [await _start(http) for _ in range(3)]
    await _start(http, status=503)
    cancelled = await http.post("/api/episode/cancel", {"episode_id": episodes[0]["episode_id"]})
    assert cancelled == {"status": "cancelled", "episode_id": episodes[0]["episode_id"]}
    await _step(http, episodes[0], "win", status=404)
    await _start(http)
    assert http.episodes.num_live == 3


@pytest.mark.parametrize("order", ["crash", "lost", "stall", "fail 9"])
async def test_a_failure_of_the_machine_is_an_error_that_frees_the_place(http: Http, order: str) -> None:
    start = await _start(http)
    assert "reward" not in await _step(http, start, order, status=500)
    await _step(http, start, "win", status=404)
    assert (await http.get("/api/health"))["active_episodes"] == http.episodes.num_live == 0


async def test_a_short_failure_is_not_seen(http: Http) -> None:
    start = await _start(http)
    assert (await _step(http, start, "fail 2"))["observation"]["content"] == "you said fail 2"


async def test_an_abandoned_conversation_expires() -> None:
    async with task_server(SERVED, lease_s=0.4) as http:
        quiet = await _start(http)
        for _ in range(1200):
            if (await http.get("/api/health"))["active_episodes"] == 0:
                break
            await asyncio.sleep(0.05)
        await _step(http, quiet, "win", status=404)
        assert http.server.conversations.all == []
