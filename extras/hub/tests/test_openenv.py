"""OpenEnv servers whose sockets die, hang, are full or speak another protocol: never a reward."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from extras.hub.openenv import OpenEnvWorld
from extras.hub.settings import PORT_MARK, OpenEnvConfig
from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import (
    CapacityError,
    EpisodeNotFoundError,
    InfrastructureError,
    InvalidRequestError,
)
from services.common.system.machine import free_ports
from services.envgateway.envs.base import EpisodeLostError
from services.envgateway.envs.episodes import make_worlds
from tests.integration.envgateway.environments.serving import served_world
from tests.waiting import WAIT_S

SCHEMA = {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
Socket = web.WebSocketResponse


def observation(text: str, reward: float | None = None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, **more}, "reward": reward, "done": done}}


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


class FakeServer:
    """Answers a reset with an observation, and a step as the test says."""

    def __init__(self) -> None:
        self.places = 100
        self.open = 0
        self.heard: list[dict[str, Any]] = []
        self.on_reset: Any = observation("go")
        self.on_step: Any = observation("on")
        self.on_state: Any = {"type": "state", "data": {"step_count": 3, "name": "x", "won": True}}

    async def socket(self, request: web.Request) -> Socket:
        socket = Socket()
        await socket.prepare(request)
        if self.open >= self.places:
            await socket.send_json(error("CAPACITY_REACHED", "full"))
            await socket.close()
            return socket
        self.open += 1
        try:
            async for message in socket:
                asked = json.loads(message.data)
                self.heard.append(asked)
                if asked["type"] == "close":
                    break
                await self._answer(socket, getattr(self, f"on_{asked['type']}"))
        finally:
            self.open -= 1
        return socket

    async def _answer(self, socket: Socket, what: Any) -> None:
        if what == "close":
            await socket.close()
        elif what == "break":
            assert socket._req is not None and socket._req.transport is not None
            socket._req.transport.abort()
        elif isinstance(what, str):
            await socket.send_str(what)
        elif what is not None:
            await socket.send_json(what)


@asynccontextmanager
async def running(server: FakeServer, port: int = 0, schema: Any = SCHEMA) -> AsyncIterator[str]:
    async def told(request: web.Request) -> web.Response:
        return web.json_response(schema)

    app = web.Application()
    app.router.add_get("/ws", server.socket)
    for path in ("/schema", "/health"):
        app.router.add_get(path, told)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def world_at(url: str, **settings: Any) -> AsyncIterator[OpenEnvWorld]:
    world = OpenEnvWorld(
        "guess", OpenEnvConfig(url=url, **{"start_timeout_s": 20.0, "step_timeout_s": 20.0, **settings})
    )
    try:
        yield world
    finally:
        await world.close()


async def test_an_episode_is_resets_steps_and_the_state_at_its_end() -> None:
    server = FakeServer()
    async with running(server) as url, world_at(url) as world:
        episode = world.build()
        assert (await episode.reset({"reset": {"level": 2}}, seed=2**40 + 7)).text == "go"
        assert (await episode.step("5")).reward == 0.0
        server.on_step = observation("found", reward=0.5, done=True)
        result = await episode.step("6")
        assert (result.reward, result.done, result.metrics) == (0.5, True, {"state_step_count": 3.0})
        await episode.close()
    assert server.heard[0] == {"type": "reset", "data": {"seed": (2**40 + 7) % 2**31, "level": 2}}
    assert server.heard[1] == {"type": "step", "data": {"text": "5"}} and server.heard[-1] == {"type": "close"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"no answer to step within 0\.05 s"),
        ("close", "closed the socket during step"),
        ("break", "during step"),
        (error("EXECUTION_ERROR", "KeyError"), "EXECUTION_ERROR: KeyError"),
        (error("UNKNOWN_TYPE"), "UNKNOWN_TYPE"),
        ({"type": "result", "data": {}}, "another version of OpenEnv's protocol"),
        ("no JSON", "another version of OpenEnv's protocol"),
        ('["list"]', "another version of OpenEnv's protocol"),
        ({"type": "observation", "data": {"observation": "text", "reward": 1.0}}, "another version"),
        ({"type": "observation", "data": {"observation": {}, "reward": "1"}}, "another version"),
        (observation("over", reward=None, done=True), "none of its steps told a reward"),
    ],
)
async def test_a_turn_that_the_server_fails_is_a_lost_episode_and_no_reward(answer: Any, message: str) -> None:
    server = FakeServer()
    async with running(server) as url, world_at(url, step_timeout_s=20.0 if answer else 0.05) as world:
        episode = world.build()
        await episode.reset({}, seed=1)
        server.on_step = answer
        with pytest.raises(EpisodeLostError, match=message):
            await episode.step("5")
        await episode.close()


async def test_an_action_that_the_server_refuses_is_told_to_the_policy() -> None:
    server = FakeServer()
    async with (
        running(server, schema={"action": {"properties": {}, "required": ["x", "y"]}}) as url,
        world_at(url) as world,
    ):
        episode = world.build()
        await episode.reset({}, seed=1)
        for text in ("no JSON", "[1]"):
            assert (await episode.step(text)).metrics == {"invalid_actions": 1.0}
        server.on_step = error("VALIDATION_ERROR", "y is missing")
        refused = await episode.step('{"x": 1}')
        assert (
            "y is missing" in refused.observation and refused.metrics == {"invalid_actions": 1.0} and not refused.done
        )
        await episode.close()


async def test_a_full_server_is_asked_again_later_and_places_are_given_back() -> None:
    server = FakeServer()
    server.places = 1
    async with running(server) as url, world_at(url) as world:
        first, second = world.build(), world.build()
        await first.reset({}, seed=1)
        with pytest.raises(CapacityError, match="full"):
            await second.reset({}, seed=1)
        await first.close()
        while server.open:
            await asyncio.sleep(0)
        await second.reset({}, seed=1)
        await second.close()


@pytest.mark.parametrize(
    ("answer", "error_type", "message"),
    [
        ("close", InfrastructureError, "closed the socket during reset"),
        (error("VALIDATION_ERROR", "level"), InvalidRequestError, "reset was refused"),
        (error("SESSION_ERROR"), InfrastructureError, "SESSION_ERROR"),
        (observation("over", done=True), EpisodeLostError, "over at its reset"),
    ],
)
async def test_an_episode_that_cannot_begin_leaves_no_place_taken(
    answer: Any, error_type: type[Exception], message: str
) -> None:
    server = FakeServer()
    server.on_reset = answer
    async with running(server) as url, world_at(url) as world:
        episode = world.build()
        with pytest.raises(error_type, match=message):
            await episode.reset({}, seed=1)
        await episode.close()
        while server.open:
            await asyncio.sleep(0)


async def test_a_server_that_starts_anew_is_waited_for_and_the_old_episode_is_lost() -> None:
    (port,) = free_ports(1)
    server = FakeServer()
    async with world_at(f"http://127.0.0.1:{port}") as world:
        async with running(server, port):
            episode = world.build()
            await episode.reset({}, seed=1)
        with pytest.raises(EpisodeLostError):
            await episode.step("5")
        await episode.close()
        again = world.build()
        begun = asyncio.create_task(again.reset({}, seed=1))  # while nothing listens
        await asyncio.sleep(0)
        async with running(server, port):
            assert (await begun).text == "go"
            await again.close()


async def test_no_server_within_the_time_limit_is_an_infrastructure_failure() -> None:
    (port,) = free_ports(1)
    async with world_at(f"http://127.0.0.1:{port}", start_timeout_s=0.3) as world:
        with pytest.raises(InfrastructureError, match=r"no connection within 0\.3 s"):
            await world.build().reset({}, seed=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither is set"),
        ({"url": "http://a", "command": ["x", PORT_MARK]}, "both are set"),
        ({"url": "127.0.0.1:8000"}, "begins with http"),
        ({"command": ["server"]}, "command has no"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OpenEnvConfig.model_validate(settings)


def test_a_program_that_is_not_there_is_named_before_the_run() -> None:
    config = EnvGatewayConfig.model_validate({"openenv": {"guess": {"command": ["/none/server", PORT_MARK]}}})
    assert "there is no program /none/server" in str(make_worlds(config)["guess"])


async def test_a_command_that_ends_at_once_or_never_serves_is_an_infrastructure_failure() -> None:
    for code, start_timeout_s, message in (
        ("raise SystemExit(3)", WAIT_S, "exited with 3"),
        ("import time; time.sleep(60)", 1.0, "did not answer at"),
    ):
        command = [sys.executable, "-c", code, PORT_MARK]
        world = OpenEnvWorld("guess", OpenEnvConfig(command=command, start_timeout_s=start_timeout_s))
        with pytest.raises(InfrastructureError, match=message):
            await world.build().reset({}, seed=1)
        await world.close()


async def serve(port: int) -> None:
    async with running(FakeServer(), port):
        await asyncio.Event().wait()


SERVE = "import asyncio, sys; from extras.hub.tests.test_openenv import serve; asyncio.run(serve(int(sys.argv[1])))"


async def test_a_server_of_the_run_that_is_killed_is_started_again_and_pays_no_zero() -> None:
    world = OpenEnvWorld("guess", OpenEnvConfig(command=[sys.executable, "-c", SERVE, PORT_MARK]))
    async with served_world("guess", world) as client:
        begun = await client.create("guess", {}, seed=5)
        first = world.process
        assert first is not None
        first.kill()
        await first.wait()
        with pytest.raises((InfrastructureError, EpisodeNotFoundError)):  # not found, where the call was repeated
            await client.step(begun.episode_id, 1, "4")
        begun = await client.create("guess", {}, seed=5, request_id="again")
        assert (await client.step(begun.episode_id, 1, "4")).observation == "on"
        assert world.num_starts == 2
