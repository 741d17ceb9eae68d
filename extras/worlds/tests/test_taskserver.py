"""The adapter's protocol over HTTP: for programs of others, and for our own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extras.worlds import agentbench, taskserver
from extras.worlds.agentbench import AgentBenchWorld
from extras.worlds.settings import AgentBenchConfig, ServedTaskConfig, TaskServerConfig
from extras.worlds.taskserver import TaskServer
from extras.worlds.tests.taskserver_scripted import ACTIONS, Http, task_server
from services.common.errors import CapacityError, ConfigError, InvalidRequestError
from services.envgateway.envs.base import EpisodeLostError
from services.envgateway.envs.episodes import EpisodeManager
from tests.integration.envgateway.environments.serving import registry
from tests.waiting import until

SERVED = {
    "orders": ServedTaskConfig(row={"extra": "more", "environment": {"max_turns": 7}}),
    "mine": ServedTaskConfig(environment="more", end=2),
}


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with task_server(SERVED, max_episodes=3) as serving:
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
    lost = await _step(http, await _start(http), "lose")
    assert (lost["info"]["status"], lost["info"]["success"]) == ("SampleStatus.AGENT_VALIDATION_FAILED", False)


async def test_every_task_has_the_protocol_under_its_name(http: Http) -> None:
    info = await http.get("/api/task/info")
    assert (info["name"], info["num_samples"], info["max_episode_length"]) == ("orders", None, 7)
    assert (await http.get("/api/mine/task/info"))["num_samples"] == 2
    mine = await _start(http, 1, "/api/mine")
    assert mine["observation"]["content"][-1]["content"] == "task 1 of seed 1, plain"
    await _start(http, 2, "/api/mine", status=404)
    await http.get("/api/nobody/health", status=404)


async def test_errors_have_the_status_codes_that_clients_know(http: Http) -> None:
    assert (await _start(http, 3, status=400))["detail"] == "nobody can play 3"
    assert "disk" in (await _start(http, 4, status=500))["detail"]
    refused = await http.post("/api/episode/start", {"sample": 1}, 422)
    assert refused["detail"][0]["loc"] == ["body", "sample_id"]
    await http.post("/api/episode/step", {"episode_id": "x", "action": {}}, 422)
    await http.post("/api/episode/step", {"episode_id": "x", "action": {"content": "y"}}, 404)
    await http.post("/api/episode/cancel", {"episode_id": "x"}, 404)


async def test_two_steps_at_once_are_refused_and_the_first_goes_on(http: Http) -> None:
    start = await _start(http)
    ACTIONS.clear()
    first = asyncio.create_task(_step(http, start, "slow"))
    await until(lambda: "slow" in ACTIONS, "the first is being taken")
    assert "busy" in (await _step(http, start, "slow", status=409))["detail"]
    assert (await first)["info"]["turn"] == 1
    assert (await _step(http, start, "fail 2"))["info"]["turn"] == 2, "a short failure is not seen"


async def test_a_cancelled_episode_is_gone_and_frees_its_place(http: Http) -> None:
    episodes = [await _start(http) for _ in range(3)]
    await _start(http, status=503)
    cancelled = await http.post("/api/episode/cancel", {"episode_id": episodes[0]["episode_id"]})
    assert cancelled == {"status": "cancelled", "episode_id": episodes[0]["episode_id"]}
    await _step(http, episodes[0], "win", status=404)
    await _start(http)
    assert http.episodes.num_live == 3


@pytest.mark.parametrize("order", ["crash", "lost", "fail 9"])
async def test_a_failure_of_the_machine_is_an_error_that_frees_the_place(http: Http, order: str) -> None:
    start = await _start(http)
    assert "reward" not in await _step(http, start, order, status=500)
    await _step(http, start, "win", status=404)
    assert http.server.num_live == http.episodes.num_live == 0


async def test_an_abandoned_episode_expires_with_the_gateways() -> None:
    async with task_server(SERVED, lease_s=0.01) as http:
        quiet = await _start(http)
        await asyncio.sleep(0.02)
        await http.episodes.expire()
        await _step(http, quiet, "win", status=404)
        assert http.server.num_live == 0


async def test_left_out_every_environment_with_numbered_tasks_is_served() -> None:
    async with task_server() as http:
        assert [(await http.get(f"/api/{name}/health"))["task_name"] for name in ("more", "orders")] == [
            "more",
            "orders",
        ]


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ({"x": ServedTaskConfig()}, "no environment 'x'"),
        ({"w": ServedTaskConfig(environment="absent")}, "not set up here: write it"),
        ({}, "no environment to serve: .*\n  absent: write it"),
    ],
)
def test_a_task_that_cannot_be_served_is_refused_at_start(served: dict[str, ServedTaskConfig], why: str) -> None:
    known = registry({"absent": "write it"})
    episodes = EpisodeManager(known, max_episodes=1, lease_s=1.0)
    with pytest.raises(ConfigError, match=why):
        TaskServer(TaskServerConfig(port=0, environments=served), "127.0.0.1", episodes, known)


async def test_our_client_plays_here_and_any_action_is_sent_so_that_the_server_reads_it(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = AgentBenchWorld(AgentBenchConfig(url=f"http://127.0.0.1:{http.server.port}/api"))
    try:
        with pytest.raises(InvalidRequestError):
            await world.build().reset({"index": 3}, 0)
        episode = world.build()
        assert (await episode.reset({"index": 2}, 0)).messages[-1]["content"] == "task 2 of seed 2, more"
        for action in (
            "x" * (17 << 20),
            "\ud800\udfff",
            "a\0b",
            '{"done": true, "reward": 1.0}',
            "",
            "\u2028" * 300_000,
        ):
            assert not (await episode.step(action)).done
        result = await episode.step("limit")
        assert (result.reward, result.done, result.status) == (6 * 0.25 + 0.25, True, "task limit reached")
        episode = world.build()
        await episode.reset({"index": 0}, 0)
        slow, late = await asyncio.gather(episode.step("slow"), episode.step("late"))
        assert (slow.observation, late.observation) == ("you said slow", "you said late"), "busy: asked again"
        with pytest.raises(EpisodeLostError):
            await episode.step("lost")
        held = [world.build() for _ in range(4)]
        for one in held[:3]:
            await one.reset({"index": 0}, 0)
        with pytest.raises(CapacityError):
            await held[3].reset({"index": 0}, 0)
        monkeypatch.setattr(agentbench, "sendable", str)
        result = await held[0].step("\ud800")  # no Unicode text: the server refuses the body
        assert (result.reward, result.done, result.status) == (0.0, True, "agent invalid action")
        assert http.episodes.num_live == 2
    finally:
        await world.close()


async def test_a_turn_without_an_answer_loses_the_episode_and_frees_its_place(http: Http) -> None:
    world = AgentBenchWorld(AgentBenchConfig(url=f"http://127.0.0.1:{http.server.port}/api", step_timeout_s=0.3))
    episode = world.build()
    await episode.reset({"index": 0}, 0)
    with pytest.raises(EpisodeLostError, match="no answer within"):
        await episode.step("slow")
    await until(lambda: http.episodes.num_live == 0)
    await world.close()


async def test_a_body_that_is_too_large_ends_the_episode_without_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskserver, "BODY_BYTES", 2000)
    async with task_server() as http:
        world = AgentBenchWorld(AgentBenchConfig(url=f"http://127.0.0.1:{http.server.port}/api"))
        episode = world.build()
        await episode.reset({"index": 0}, 0)
        result = await episode.step("a" * 3000)
        assert (result.reward, result.done, result.status) == (0.0, True, "agent invalid action")
        assert http.episodes.num_live == 0
        await world.close()
