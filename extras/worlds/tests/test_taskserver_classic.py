"""The classic controller's protocol over HTTP: sessions by number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extras.worlds.taskserver import Tasks, TaskServer
from extras.worlds.tests.taskserver_scripted import ACTIONS, Http, OrdersWorld, task_server
from services.common.config.envgateway import ServedTaskConfig, TaskServerConfig
from services.common.errors import ConfigError
from services.envgateway.envs.episodes import EpisodeManager
from tests.integration.envgateway.environments.serving import registry
from tests.waiting import until

SERVED = {
    "orders-std": ServedTaskConfig(environment="orders", concurrency=2, end=5),
    "named": ServedTaskConfig(),
}
OPENING = [
    {"role": "user", "content": "rules"},
    {"role": "agent", "content": "Ok."},
    {"role": "user", "content": "task 1 of seed 1, plain"},
]


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with task_server(SERVED) as serving:
        yield serving


async def _start(http: Http, index: object = 1, status: int = 200, name: str = "orders-std") -> Any:
    return await http.post("/api/start_sample", {"name": name, "index": index}, status)


async def _say(http: Http, number: int, content: str | None, status: int = 200, agent: str = "normal") -> Any:
    body = {"session_id": number, "agent_response": {"content": content, "status": agent}}
    return await http.post("/api/interact", body, status)


async def test_a_session_from_start_to_end_shows_the_whole_history(http: Http) -> None:
    start = await _start(http)
    number = start["session_id"]
    assert start["output"] == {"index": None, "status": "running", "result": None, "history": OPENING}
    said = [{"role": "agent", "content": "hello"}, {"role": "user", "content": "you said hello"}]
    assert (await _say(http, number, "hello"))["output"]["history"] == OPENING + said
    end = (await _say(http, number, "win"))["output"]
    assert (end["index"], end["status"]) == (1, "completed")
    assert end["result"] == {"reward": 1.0, "result": 1.0, "turns": 2, "metrics": {"wins": 1.0}}
    assert end["history"] == [*OPENING, *said, {"role": "agent", "content": "win"}]
    await _say(http, number, "again", status=400)
    assert (await _start(http))["session_id"] != number


async def test_indices_workers_and_sessions_are_listed(http: Http) -> None:
    assert await http.get("/api/get_indices?name=orders-std") == [0, 1, 2, 3, 4]
    assert await http.get("/api/get_indices?name=named") == ["a", "b"]
    await http.get("/api/get_indices?name=nobody", 400)
    await http.get("/api/get_indices", 422)
    number = (await _start(http))["session_id"]
    workers = await http.get("/api/list_workers")
    assert workers["orders-std"]["indices"] == [0, 1, 2, 3, 4]
    worker = workers["orders-std"]["workers"]["0"]
    assert (worker["status"], worker["capacity"], worker["current"], worker["locked"]) == (0, 2, 1, False)
    listed = (await http.get("/api/list_sessions"))[str(number)]
    assert (listed["name"], listed["index"], listed["worker_id"], listed["locked"]) == ("orders-std", 1, 0, False)
    for call in ("sync_all", "clean_worker", "clean_session"):
        assert await http.post(f"/api/{call}") is None
    assert await http.post("/api/cancel_all") is None
    assert await http.get("/api/list_sessions") == {} and http.episodes.num_live == 0


async def test_refusals_have_the_codes_that_clients_know(http: Http) -> None:
    await _start(http, name="nobody", status=406)
    await _start(http, 5, status=400)
    await _start(http, "x", status=400)
    await _start(http, 3, status=400)
    assert "disk" in (await _start(http, 4, status=501))["detail"]
    await http.post("/api/start_sample", {"name": "orders-std"}, 422)
    number = (await _start(http))["session_id"]
    await _say(http, number, None, status=422)
    await _say(http, number, "x", status=422, agent="sleepy")
    await _say(http, 10**6, "x", status=400)
    await http.post("/api/cancel", {"session_id": 10**6}, 400)
    await _start(http)
    await _start(http, status=406)
    assert await http.post("/api/cancel", {"session_id": number}) == {"session_id": number}
    await _start(http)


async def test_an_agent_may_give_up(http: Http) -> None:
    number = (await _start(http))["session_id"]
    await _say(http, number, "hello")
    full = (await _say(http, number, None, agent="agent context limit"))["output"]
    assert (full["status"], full["result"]["reward"], full["index"]) == ("agent context limit", 0.25, 1)
    number = (await _start(http))["session_id"]
    gone = (await _say(http, number, None, agent="cancelled"))["output"]
    assert gone["status"] == "unknown" and await http.get("/api/list_sessions") == {}


async def test_two_turns_at_once_are_refused_as_busy_text(http: Http) -> None:
    number = (await _start(http))["session_id"]
    ACTIONS.clear()
    first = asyncio.create_task(_say(http, number, "slow"))
    await until(lambda: "slow" in ACTIONS, "the first is being taken")
    assert isinstance(await _say(http, number, "slow", status=500), str)
    assert (await http.get("/api/list_sessions"))[str(number)]["locked"]
    assert len((await first)["output"]["history"]) == len(OPENING) + 2


async def test_a_cancel_ends_a_session_whose_turn_is_being_taken(http: Http) -> None:
    number = (await _start(http))["session_id"]
    ACTIONS.clear()
    running = asyncio.create_task(_say(http, number, "slow", status=400))
    await until(lambda: "slow" in ACTIONS, "the first is being taken")
    await http.post("/api/cancel", {"session_id": number})
    assert "detail" in await running
    assert (await http.get("/api/list_workers"))["orders-std"]["workers"]["0"]["current"] == 0


@pytest.mark.parametrize("order", ["crash", "lost", "fail 9"])
async def test_a_task_that_fails_is_501_and_frees_its_place(http: Http, order: str) -> None:
    number = (await _start(http))["session_id"]
    output = (await _say(http, number, order, status=501))["detail"]["output"]
    assert (output["status"], output["index"]) == ("task error", 1) and isinstance(output["result"], str)
    assert await http.get("/api/list_sessions") == {} and http.episodes.num_live == 0


async def test_overall_is_the_mean_over_samples_with_a_result(http: Http) -> None:
    results = [
        {"index": n, "status": "completed", "result": {"reward": r}, "history": []} for n, r in ((0, 1.0), (1, 0.5))
    ]
    results += [{"index": 2, "status": "task error", "result": "it broke", "history": []}]
    overall = await http.post("/api/calculate_overall", {"name": "orders-std", "results": results})
    assert overall["reward"] == 0.75
    assert overall["overall"] == {"total": 2, "pass": 1, "wrong": 1, "success_rate": 0.5}
    assert (await http.post("/api/calculate_overall", {"name": "named", "results": []}))["reward"] == 0.0
    await http.post("/api/calculate_overall", {"name": "nobody", "results": []}, 400)


async def test_the_full_gateway_is_no_free_worker() -> None:
    async with task_server(SERVED, max_episodes=1) as http:
        await _start(http)
        await _start(http, status=406)
        assert (await http.get("/api/list_workers"))["orders-std"]["workers"]["0"]["current"] == 1


async def test_left_out_every_environment_that_lists_its_tasks_is_served() -> None:
    async with task_server() as http:
        assert sorted(await http.get("/api/list_workers")) == ["named", "orders"]


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ({"x": ServedTaskConfig()}, "no environment 'x'"),
        ({"x": ServedTaskConfig(environment="single_step")}, "say how many there are with `end`"),
        ({"w": ServedTaskConfig(environment="absent")}, "not set up here: write it"),
    ],
)
def test_a_task_that_cannot_be_served_is_refused_at_start(served: dict[str, ServedTaskConfig], why: str) -> None:
    known = registry({"orders": OrdersWorld(), "absent": "write it"})
    with pytest.raises(ConfigError, match=why):
        Tasks(TaskServerConfig(environments=served), known)


def test_without_environments_the_error_names_the_missing_part_of_each_world() -> None:
    missing = "envgateway.alfworld.data: there is no folder /data/alfworld"
    known = registry({"alfworld": missing})
    episodes = EpisodeManager(known, max_episodes=1, lease_s=1.0)
    with pytest.raises(ConfigError, match=f"no environment to serve: .*\n  alfworld: {missing}$"):
        TaskServer(TaskServerConfig(port=0), "127.0.0.1", episodes, known, idle_s=1.0)


async def test_a_range_of_tasks_that_the_environment_does_not_have_is_refused_with_both_numbers() -> None:
    tasks = Tasks(
        TaskServerConfig(environments={"orders": ServedTaskConfig(end=4699)}), registry({"orders": OrdersWorld()})
    )
    with pytest.raises(ConfigError, match=r"'orders' holds \d+ tasks; .*environments\.orders\.end is 4699"):
        await tasks.indices(tasks.all[0])


async def test_older_turns_leave_out_actions_of_the_newest_turn(http: Http) -> None:
    number = (await _start(http))["session_id"]
    newest = (await _say(http, number, "long"))["output"]["history"]
    assert newest[-1]["content"] == "seen, and what is possible now"
    older = (await _say(http, number, "hello"))["output"]["history"]
    assert [message["content"] for message in older[-4:]] == ["long", "seen", "hello", "you said hello"]


@pytest.mark.parametrize("reward", ["much", None, [1], {}, "1" * 400])
async def test_rewards_that_are_no_numbers_are_refused(http: Http, reward: object) -> None:
    body = {"name": "orders-std", "results": [{"result": {"reward": reward}}]}
    await http.post("/api/calculate_overall", body, status=422)
