"""Episodes at an OpenEnv server, each over a socket of its own; a server that a recipe names by its command is started with
the first episode, and again after its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from typing import Any

import aiohttp
import structlog

from extras.hub.settings import PORT_MARK, PYTHON_MARK, OpenEnvConfig
from services.common.aio import backoff
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.common.system.child import bound_to_this_process
from services.common.system.machine import LOOPBACK, free_ports
from services.common.system.processes import how_ended, process_group
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult

log = structlog.get_logger()
Socket = aiohttp.ClientWebSocketResponse

RESET_KEY = "reset"  # of a row: further arguments of reset
_ASK_AGAIN_S = 0.1
_GRACE_S = 3.0  # from SIGTERM on: a container's client stops the container
_QUESTION_S = 10.0  # a request for the schema
_CLOSE_S = 2.0  # less than the gateway waits for an environment to close
_MESSAGE_BYTES = 64 * 1024 * 1024
_MOST_CHARS = 100_000  # of an action
_SHOWN_CHARACTERS = 500
_INVALID = {"invalid_actions": 1.0}
_FULL, _REFUSED = "CAPACITY_REACHED", "VALIDATION_ERROR"  # the server's codes that decide what is done


class ServerRefusedError(EpisodeLostError):
    """The server answered with an error, and its ``code``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def _content(text: str, wanted: str, url: str) -> Mapping[str, Any]:
    """The data of an answer. Raises ``ServerRefusedError``, and ``EpisodeLostError`` for another protocol."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    kind, data = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
    if isinstance(data, dict) and kind == wanted:
        return data
    if not isinstance(data, dict) or kind != "error":
        raise EpisodeLostError(f"{url} speaks another version of OpenEnv's protocol: it answered {_shown(text)}")
    code, told = str(data.get("code", "")), _shown(str(data.get("message", "")))
    if errors := data.get("errors"):
        told += f": {_shown(json.dumps(errors))}"
    raise ServerRefusedError(f"{url} answered {code or 'an error'}: {told}", code)


def _observed(data: Mapping[str, Any], url: str) -> tuple[Mapping[str, Any], float | None, bool]:
    """Observation, reward (None where the server tells none) and whether the episode is over."""
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    is_told = reward is None or isinstance(reward, int | float)
    if not isinstance(observation, dict) or not is_told or not isinstance(done, bool):
        raise EpisodeLostError(
            f"{url} speaks another version of OpenEnv's protocol: its observation is {_shown(str(data))}"
        )
    return observation, None if reward is None else float(reward), done


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class OpenEnvEpisode:
    """The policy's text becomes the action: the value of one field, or a JSON object where an action has several.

    Text that is no action is answered with the error, and the episode goes on. Numbers of the environment's state at
    its end are metrics.
    """

    def __init__(self, world: OpenEnvWorld) -> None:
        self._world = world
        self._socket: Socket | None = None
        self._field: str | None = None
        self._was_paid = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin. A server that draws nothing leaves the seed out."""
        arguments = task.get(RESET_KEY, {})
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"the task's {RESET_KEY!r} is {arguments!r:.80}; must be an object, the arguments of reset"
            )
        try:
            self._socket, data = await self._world.begin({"seed": seed % 2**31, **arguments})
        except ServerRefusedError as refused:
            if refused.code == _REFUSED:
                raise InvalidRequestError(f"reset was refused: {refused.message}") from refused
            raise
        self._field = await self._world.action_field()
        observation, _, done = _observed(data, self._world.url)
        if done:
            raise EpisodeLostError(f"{self._world.url}: the episode was over at its reset")
        return Observation(text=self._text(observation))

    async def step(self, action: str) -> StepResult:
        assert self._socket is not None, "stepped before reset, or after the end"
        world, sendable = self._world, action[:_MOST_CHARS].encode(errors="replace").decode()
        try:
            payload = {self._field: sendable} if self._field is not None else json.loads(sendable)
            if not isinstance(payload, dict):
                raise ValueError(f"it is a {type(payload).__name__}")
        except ValueError as error:
            return StepResult(observation=f"The action must be a JSON object: {error}", metrics=_INVALID)
        try:
            data = await world.ask(self._socket, "step", payload, "observation", world.config.step_timeout_s)
        except ServerRefusedError as refused:
            if refused.code == _REFUSED:
                return StepResult(observation=f"The action was refused: {refused.message}", metrics=_INVALID)
            raise
        observation, reward, done = _observed(data, world.url)
        self._was_paid = self._was_paid or reward is not None
        if done and not self._was_paid:
            raise EpisodeLostError(f"{world.url}: the episode ended, and none of its steps told a reward")
        return StepResult(
            observation=self._text(observation),
            reward=reward or 0.0,
            done=done,
            status=EndStatus.COMPLETED if done else "",
            metrics=await self._state(self._socket) if done else {},
        )

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await self._world.end(socket)

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The configured field; else the only text of the observation; else all of it as JSON."""
        field = self._world.config.observation
        if field is not None:
            if field not in observation:
                raise EpisodeLostError(
                    f"{self._world.url}: the observation has no {field!r} (envgateway.openenv.*.observation); it has "
                    f"{', '.join(observation) or 'nothing'}"
                )
            value = observation[field]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(dict(observation))

    async def _state(self, socket: Socket) -> dict[str, float]:
        """Numbers of the state. The episode is over and paid: without an answer they are left out."""
        try:
            state = await self._world.ask(socket, "state", None, "state", self._world.config.step_timeout_s)
        except EpisodeLostError:
            return {}
        return {
            f"state_{name}": float(value)
            for name, value in state.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }


class OpenEnvWorld:
    """One server: its address or its process, its sockets, and the form of its actions."""

    is_remote = True  # the server is at fault for errors of its episodes, not the action

    def __init__(self, name: str, config: OpenEnvConfig) -> None:
        self.config = config
        self.url = config.url or ""
        self._where = f"envgateway.openenv.{name}"
        self._client: aiohttp.ClientSession | None = None
        self._open: set[Socket] = set()
        self._field: tuple[str | None] | None = None  # once it is known
        self._changing = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()  # holds the process
        self.process: Process | None = None
        self.num_starts = 0

    def build(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self)

    async def begin(self, arguments: Mapping[str, Any]) -> tuple[Socket, Mapping[str, Any]]:
        try:
            return await self._begin(arguments)
        except CapacityError:
            # A server of ours that is full without a socket of ours has leaked their places.
            if not self.config.command or self._open:
                raise
            log.warning("openenv.leaked_places", setting=self._where)
            async with self._changing:
                await self._stop()
            return await self._begin(arguments)

    async def ask(
        self, socket: Socket, kind: str, data: Mapping[str, Any] | None, wanted: str, timeout_s: float
    ) -> Mapping[str, Any]:
        """The data of the server's answer.

        Raises:
            CapacityError: the server has no place for another session.
            ServerRefusedError: the server answered with another error.
            EpisodeLostError: the socket is dead, or the server speaks another protocol.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # a server without a place says so before it hears anything
                    await socket.send_str(json.dumps(message))
                answer = await socket.receive()
        except TimeoutError:
            raise EpisodeLostError(f"{self.url}: no answer to {kind} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeLostError(f"{self.url}: the socket broke during {kind}: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            is_error = answer.type is aiohttp.WSMsgType.ERROR
            why = _shown(str(answer.data)) if is_error else f"code {socket.close_code}"
            raise EpisodeLostError(f"{self.url}: the server closed the socket during {kind} ({why})")
        try:
            return _content(answer.data, wanted, self.url)
        except ServerRefusedError as refused:
            if refused.code == _FULL:
                raise CapacityError(refused.message, retry_after_s=1.0) from refused
            raise

    async def end(self, socket: Socket) -> None:
        """Tell the server that the session is over, so that it frees the place at once; then close the socket."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                if not socket.closed:
                    await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # a server that is gone has no place to free
        finally:
            self._open.discard(socket)

    async def action_field(self) -> str | None:
        """Raises ``InfrastructureError`` where the server does not tell the form of its actions."""
        if self.config.action is not None:
            return self.config.action
        if self._field is None:
            url = f"{self.url.rstrip('/')}/schema"
            try:
                async with asyncio.timeout(_QUESTION_S), self._opened().get(url) as response:
                    self._field = (_text_field((await response.json())["action"]),)
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                raise InfrastructureError(
                    f"{url} does not tell the form of an action ({type(error).__name__}): name its field in "
                    f"{self._where}.action"
                ) from error
        return self._field[0]

    async def close(self) -> None:
        for socket in list(self._open):
            await self.end(socket)
        if self._client is not None:
            await self._client.close()
        async with self._changing:
            await self._stop()

    async def _begin(self, arguments: Mapping[str, Any]) -> tuple[Socket, Mapping[str, Any]]:
        if self.config.command:
            async with self._changing:
                if self.process is None or self.process.returncode is not None:
                    if self.process is not None:
                        log.warning("openenv.ended", setting=self._where, how=how_ended(self.process.returncode or 0))
                    await self._stop()
                    await self._start()
        socket = await self._connected()
        self._open.add(socket)
        try:
            return socket, await self.ask(socket, "reset", arguments, "observation", self.config.start_timeout_s)
        except BaseException:  # cancelled, too: the place must be free again
            await self.end(socket)
            raise

    async def _connected(self) -> Socket:
        """Connect, again and again while the server does not listen, as one that is starting anew does not."""
        address, error = f"{self.url.rstrip('/')}/ws", None
        timeout_s = self.config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for pause_s in backoff(first_s=0.1, longest_s=2.0):
                    try:
                        return await self._opened().ws_connect(address, max_msg_size=_MESSAGE_BYTES, autoping=True)
                    except aiohttp.WSServerHandshakeError as refused:
                        raise InfrastructureError(
                            f"{address} is no socket of an OpenEnv server (HTTP {refused.status}): the server needs openenv-core "
                            "0.2 or newer, and its URL without /ws"
                        ) from refused
                    except (aiohttp.ClientError, OSError) as failed:
                        error = failed
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            why = f"{type(error).__name__}: {error}" if error else "the server does not answer"
            raise InfrastructureError(f"{address}: no connection within {timeout_s:g} s: {why}") from error
        raise AssertionError("unreachable: backoff has no end")

    async def _start(self) -> None:
        """Start the server, and wait until it is healthy."""
        (port,) = free_ports(1)
        command = [
            part.replace(PORT_MARK, str(port)).replace(PYTHON_MARK, sys.executable) for part in self.config.command
        ]
        self.url = f"http://{LOOPBACK}:{port}"
        try:
            self.process = await self._stack.enter_async_context(
                process_group(*bound_to_this_process(command), grace_s=_GRACE_S, stdin=DEVNULL, stdout=DEVNULL)
            )
        except OSError as error:
            raise InfrastructureError(f"{self._where}.command cannot be started: {error}") from error
        self.num_starts += 1
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                while self.process.returncode is None:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with self._opened().get(f"{self.url}/health") as response:
                            if response.status == 200:
                                log.info("openenv.started", setting=self._where, url=self.url)
                                return
                    await asyncio.sleep(_ASK_AGAIN_S)
            why = f"{how_ended(self.process.returncode)} before it served; its output is in the gateway's log"
        except TimeoutError:
            why = (
                f": the server did not answer at {self.url}/health within {self.config.start_timeout_s:g} s: is "
                f"{PORT_MARK} in the command as its port?"
            )
        await self._stop()
        raise InfrastructureError(f"{self._where}.command {why}")

    async def _stop(self) -> None:
        self.process = None
        await self._stack.aclose()

    def _opened(self) -> aiohttp.ClientSession:
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._client


def _text_field(schema: Any) -> str | None:
    """The only required field of an action, where it is text.

    >>> _text_field({"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]})
    'message'
    """
    required = schema.get("required", []) if isinstance(schema, dict) else []
    fields = schema.get("properties", {}) if isinstance(schema, dict) else {}
    is_text = len(required) == 1 and fields.get(required[0], {}).get("type") == "string"
    return str(required[0]) if is_text else None


def make_world(name: str, config: OpenEnvConfig) -> OpenEnvWorld | str:
    program = config.command[0] if config.command else PYTHON_MARK
    if program != PYTHON_MARK and shutil.which(program) is None:
        return f"envgateway.openenv.{name}.command: there is no program {program}: write its path, or install it"
    return OpenEnvWorld(name, config)
