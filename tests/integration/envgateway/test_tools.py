"""Tools through episodes, over real gRPC: states, limits, statistics, a full house, processes that die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common import errors
from services.common.config.envgateway import EnvGatewayConfig, LiveConfig, ToolsConfig
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.rpc.client import channel
from services.common.tools import ToolError
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.environments.serving import Client
from tests.integration.envgateway.sandbox_state import assert_clean, kill_supervisor, programs, supervisor_of
from tests.waiting import until


class Capital:
    """A user's tool."""

    name = "capital"
    description = "The capital of a country."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 40}},
        "required": ["country"],
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments["country"] != "France":
            raise ToolError(f"no country {arguments['country']!r}")
        return "Paris " * 20


class Played:
    """One gateway and episodes of its tools."""

    def __init__(self, connection: grpc.aio.Channel, pool: SandboxPool) -> None:
        self._client = Client(pb_grpc.EnvironmentServiceStub(connection))
        self.pool = pool

    async def episode(self, environment: str, tools: list[str], **settings: Any) -> Episode:
        task = {"question": "?", "answer": "4", "environment": {"tools": tools, **settings}}
        return Episode(self._client, await self._client.create(environment, task))

    async def all_ended(self) -> None:
        await until(lambda: not self.pool.live.gauges["live_processes"])
        await assert_clean(self.pool)


class Episode:
    def __init__(self, client: Client, created: pb.CreateEpisodeResponse) -> None:
        self._client = client
        self.created = created
        self._turn = 0

    async def act(self, action: str) -> pb.StepEpisodeResponse:
        response = await self._client.step(self.created.episode_id, self._turn + 1, action)
        self._turn += 1
        return response

    async def cell(self, code: str) -> pb.StepEpisodeResponse:
        return await self.act(json.dumps({"name": "jupyter_code", "arguments": {"code": code}}))

    async def close(self) -> None:
        await self._client.close(self.created.episode_id)


def _tagged(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _status(response: pb.StepEpisodeResponse) -> str:
    (name,) = [name for name in response.metrics if name.startswith("tool_status_")]
    return name.removeprefix("tool_status_")


BRIEF = CONFIG.model_copy(update={"wall_time_s": 3.0})


@pytest.fixture
async def played(request: pytest.FixtureRequest) -> AsyncIterator[Played]:
    """``request.param``: seconds that a cell may take."""
    cell_time_s = getattr(request, "param", 2.0)
    config = EnvGatewayConfig(
        port=0,
        sandbox=BRIEF,
        tools=ToolsConfig(
            paths=[f"{__name__}:Capital"],
            jupyter=LiveConfig(cell_time_s=cell_time_s, cpu_time_s=20, memory_bytes=128 << 20, output_bytes=10_000),
        ),
        episode_lease_s=60,
    )
    pool = SandboxPool.start_before_threads(BRIEF)
    gateway = Gateway(config, pool)
    connection = channel(f"127.0.0.1:{await gateway.start()}")
    yield Played(connection, pool)
    await connection.close()
    await gateway.stop()


async def test_cells_of_one_episode_share_a_process_and_no_other_does(played: Played) -> None:
    first, second = [await played.episode("tools", ["jupyter_code"]) for _ in range(2)]
    schema = json.loads(first.created.tools_json)[0]["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("jupyter_code", ["code"])
    assert (await first.cell("x = 6")).observation == "(no output)"
    assert "NameError" in (await second.cell("x")).observation
    answer = await first.cell("x * 7")
    assert (answer.observation, answer.done, answer.reward, _status(answer)) == ("42", False, 0.0, "ok")
    for episode in (first, second):
        await episode.close()
    await played.all_ended()


async def test_a_cell_that_fails_says_how_and_keeps_or_loses_the_state(played: Played) -> None:
    episode = await played.episode("tools", ["jupyter_code"], max_response_chars=2000)
    await episode.cell("x = 1")
    raised = await episode.cell("print('Error is only a word')\n1 / 0")
    assert _status(raised) == "program_error" and raised.observation.startswith("Error is only a word\nTraceback")
    assert _status(await episode.cell("print('Error: a word')")) == "ok"
    late = await episode.cell("import time\ntime.sleep(60)")
    assert (_status(late), "TimeoutError: stopped after " in late.observation) == ("time_limit", True)
    assert _status(await episode.cell("print('a' * 20_000)")) == "output_limit"
    assert (await episode.cell("x")).observation == "1"
    killed = await episode.cell("held = bytearray(b'x') * (300 << 20)")
    assert _status(killed) == "memory_limit" and "what earlier cells defined is gone" in killed.observation
    fresh = await episode.cell("'x' in globals()")
    assert _status(fresh) == "ok"
    assert fresh.observation == (
        "(a fresh process, without what earlier cells defined: it used too much memory)\nFalse"
    )
    assert (await episode.cell("'told once'")).observation == "'told once'"
    metrics = dict((await episode.cell("1")).metrics)
    assert (metrics["tool_calls"], metrics["tool_errors"]) == (10, 4)
    kinds = {name: n for name, n in metrics.items() if name.startswith("tool_errors_")}
    assert kinds == {f"tool_errors_{k}": 1 for k in ("program_error", "time_limit", "output_limit", "memory_limit")}
    assert 1.9 <= metrics["tool_latency_max_s"] <= metrics["tool_latency_s"]
    await episode.close()
    await played.all_ended()


async def test_a_process_that_ends_between_two_cells_is_reported_and_replaced(played: Played) -> None:
    episode = await played.episode("tools", ["jupyter_code"])
    await episode.cell("import os, threading\nx = 1\nthreading.Timer(1.0, os._exit, (3,)).start()")  # after the cell
    await until(lambda: not programs(supervisor_of(played.pool)), "it has ended")
    other = await played.episode("tools", ["jupyter_code"])
    await other.cell("1")  # its answer comes after the supervisor's message of the end
    fresh = await episode.cell("'x' in globals()")
    assert _status(fresh) == "ok" and fresh.observation.endswith("it ended between two calls)\nFalse")
    for one in (episode, other):
        await one.close()
    await played.all_ended()


@pytest.mark.parametrize("played", [45.0], indirect=True)
async def test_a_supervisor_killed_in_mid_cell_is_an_error_and_never_a_tool_result(played: Played) -> None:
    episode = await played.episode("tools", ["jupyter_code"])
    await episode.cell("x = 1")
    cell = asyncio.create_task(episode.cell("import time\ntime.sleep(40)"))
    await asyncio.sleep(0.5)  # usually in mid-cell; the property holds at any moment
    kill_supervisor(played.pool)
    # the second: of the channel's own second attempt, where the episode is closed by then
    with pytest.raises((errors.InfrastructureError, errors.EpisodeNotFoundError), match="jupyter_code was lost"):
        await cell
    another = await played.episode("tools", ["jupyter_code"])
    assert (await another.cell("'x' in globals()")).observation == "False"
    for one in (episode, another):
        await one.close()
    await played.all_ended()


async def test_the_gateways_end_ends_all_processes(tmp_path: Path) -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    gateway = Gateway(EnvGatewayConfig(port=0, sandbox=CONFIG), pool)
    connection = channel(f"127.0.0.1:{await gateway.start()}")
    episode = await Played(connection, pool).episode("tools", ["jupyter_code"])
    await episode.cell("import threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()")
    await connection.close()
    await gateway.stop()
    assert not pool.live.gauges["live_processes"]


async def test_the_tool_environment_counts_plays_and_grades(played: Played) -> None:
    episode = await played.episode(
        "tool", ["python", "python_code_with_standard_io", "jupyter_code", "capital"], reward="boxed", max_turns=12
    )
    names = [tool["function"]["name"] for tool in json.loads(episode.created.tools_json)]
    assert names == ["python", "python_code_with_standard_io", "jupyter_code", "capital"]
    for action, expected in (
        (_tagged("python", code="print('error', 40 + 2)"), "error 42"),
        (_tagged("python_code_with_standard_io", code="input()[::-1]", input="abc"), "'cba'"),
        (_tagged("jupyter_code", code="x = 2"), "(no output)"),
        (_tagged("jupyter_code", code="x + 2"), "4"),
        (_tagged("capital", country="France"), "Paris"),
        (_tagged("capital", country="Atlantis"), "Error: no country 'Atlantis'"),
        (_tagged("capital", city="Paris"), "Error: argument 'country' is missing"),
        (_tagged("capitol", country="France"), "Error: no tool 'capitol'; there is python, "),
        ("<tool_call>{'name'}</tool_call>", "Error: malformed tool call: not valid JSON"),
        (_tagged("python", code="import time; time.sleep(9)"), "TimeoutError: stopped after "),
    ):
        response = await episode.act(action)
        assert response.observation.startswith(expected), (action, response.observation)
        assert not response.done
    end = await episode.act("so it is \\boxed{4}")
    assert (end.done, end.reward, end.metrics["tool_calls"], end.metrics["tool_errors"]) == (True, 1.0, 10, 5)
    for kind in ("tool_error", "invalid_arguments", "unknown_tool", "malformed_call", "time_limit"):
        assert end.metrics[f"tool_errors_{kind}"] == 1
    assert end.metrics["tool_calls_jupyter_code"] == 2
    await episode.close()
    await played.all_ended()


async def test_an_expired_episode_ends_its_process() -> None:
    pool = SandboxPool.start_before_threads(CONFIG)
    gateway = Gateway(EnvGatewayConfig(port=0, sandbox=CONFIG, episode_lease_s=2.0), pool)
    connection = channel(f"127.0.0.1:{await gateway.start()}")
    played = Played(connection, pool)
    try:
        episode = await played.episode("tools", ["jupyter_code"])
        await episode.cell("1")
        await played.all_ended()
        with pytest.raises(errors.EpisodeNotFoundError):
            await episode.cell("1")
    finally:
        await connection.close()
        await gateway.stop()
