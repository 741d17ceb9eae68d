"""State shared by the episodes of one OpenEnv server: its address or its process, its sessions, and the form of its actions."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import shutil
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from services.common.aio import backoff
from services.common.config.envgateway import PORT_MARK, PYTHON_MARK, OpenEnvConfig
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.common.system.child import bound_to_this_process
from services.common.system.machine import LOOPBACK, free_ports
from services.common.system.processes import how_ended, process_group
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult

# --- The process of an OpenEnv server that a recipe names by its command: started with the first episode, again after its
# end.


log = structlog.get_logger()
_ASK_AGAIN_S = 0.1
_CONNECTIONS = 256  # sockets open at once, one for each episode
_GRACE_S = 3.0  # from SIGTERM on: a container's client stops the container


class ServerProcess:
    def __init__(self, setting: str, config: OpenEnvConfig) -> None:
        self._setting, self._config = setting, config
        self._stack = contextlib.AsyncExitStack()
        self._process: Process | None = None
        self._url = ""
        self._changing = asyncio.Lock()
        self.num_starts = 0

    async def url(self) -> str:
        """The address of the running server, which is started where it does not run. Raises ``InfrastructureError``."""
        async with self._changing:
            if self._process is None or self._process.returncode is not None:
                if self._process is not None:
                    log.warning("openenv.ended", setting=self._setting, how=how_ended(self._process.returncode or 0))
                await self._stop()
                await self._start()
            return self._url

    async def restart(self) -> None:
        """End the server; the next address is of another one."""
        async with self._changing:
            await self._stop()

    async def close(self) -> None:
        async with self._changing:
            await self._stop()

    async def _start(self) -> None:
        (port,) = free_ports(1)
        marks = {PORT_MARK: str(port), PYTHON_MARK: sys.executable}
        command = [_filled(part, marks) for part in self._config.command]
        try:
            self._process = await self._stack.enter_async_context(
                process_group(*bound_to_this_process(command), grace_s=_GRACE_S, stdin=DEVNULL, stdout=DEVNULL)
            )
        except OSError as error:
            raise InfrastructureError(f"{self._setting}.command cannot be started: {error}") from error
        self._url = f"http://{LOOPBACK}:{port}"
        self.num_starts += 1
        await self._until_healthy(self._process)
        log.info("openenv.started", setting=self._setting, url=self._url)

    async def _until_healthy(self, process: Process) -> None:
        limit = asyncio.timeout(self._config.start_timeout_s)
        try:
            async with limit, aiohttp.ClientSession() as client:
                while process.returncode is None:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with client.get(f"{self._url}/health") as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError:
            await self._stop()
            raise InfrastructureError(
                f"{self._setting}.command: the server did not answer at {self._url}/health within "
                f"{self._config.start_timeout_s:g} s: is {PORT_MARK} in the command as its port?"
            ) from None
        code = process.returncode
        await self._stop()
        raise InfrastructureError(
            f"{self._setting}.command {how_ended(code)} before it served; its output is in the gateway's log"
        )

    async def _stop(self) -> None:
        self._process = None
        await self._stack.aclose()


def _filled(part: str, marks: Mapping[str, str]) -> str:
    for mark, value in marks.items():
        part = part.replace(mark, value)
    return part


# --- OpenEnv's messages: what goes over the socket of one episode, and how its answers are read.


_SHOWN_CHARACTERS = 500


class Message(enum.StrEnum):
    RESET = "reset"
    STEP = "step"
    STATE = "state"
    CLOSE = "close"
    OBSERVATION = "observation"
    ERROR = "error"


class ErrorCode(enum.StrEnum):
    """Those of the server's codes that decide what is done."""

    CAPACITY_REACHED = "CAPACITY_REACHED"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    INVALID_JSON = "INVALID_JSON"


class ServerRefusedError(EpisodeLostError):
    """The server answered with an error. ``code`` is its word, which need not be one of ``ErrorCode``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An observation with its reward, which is None where the server tells none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


def content_of(text: str, wanted: Message, url: str) -> Mapping[str, Any]:
    """The data of an answer. Raises ``ServerRefusedError``, and ``EpisodeLostError`` for another protocol."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    kind, data = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
    if not isinstance(data, dict) or kind not in (wanted.value, Message.ERROR.value):
        raise EpisodeLostError(f"{url} speaks another version of OpenEnv's protocol: it answered {shown(text)}")
    if kind == Message.ERROR.value:
        code = str(data.get("code", ""))
        told = shown(str(data.get("message", "")))
        if errors := data.get("errors"):
            told += f": {shown(json.dumps(errors))}"
        raise ServerRefusedError(f"{url} answered {code or 'an error'}: {told}", code)
    return data


def answer_of(data: Mapping[str, Any], url: str) -> Answer:
    """Raises ``EpisodeLostError`` for data that is no observation."""
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    told = reward is None or isinstance(reward, int | float)
    if not isinstance(observation, dict) or not told or not isinstance(done, bool):
        raise EpisodeLostError(
            f"{url} speaks another version of OpenEnv's protocol: its observation is {shown(str(data))}"
        )
    return Answer(observation=observation, reward=None if reward is None else float(reward), done=done)


def shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


_CLOSE_S = 2.0  # less than the gateway waits for an environment to close
_MESSAGE_BYTES = 64 * 1024 * 1024
_RETRY_AFTER_S = 1.0


class OpenEnvSession:
    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._url, self._socket = url, socket

    @classmethod
    async def open(cls, client: aiohttp.ClientSession, url: str, timeout_s: float) -> OpenEnvSession:
        """Connect, again and again while the server does not listen, as one that is starting anew does not.

        Raises:
            InfrastructureError: no connection within ``timeout_s``, or no OpenEnv server.
        """
        address = f"{url.rstrip('/')}/ws"
        error: Exception | None = None
        try:
            async with asyncio.timeout(timeout_s):
                for pause_s in backoff(first_s=0.1, longest_s=2.0):
                    try:
                        return cls(url, await client.ws_connect(address, max_msg_size=_MESSAGE_BYTES, autoping=True))
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

    async def ask(
        self, kind: Message, data: Mapping[str, Any] | None, wanted: Message, timeout_s: float
    ) -> Mapping[str, Any]:
        """The data of the server's answer.

        Raises:
            CapacityError: the server has no place for another session.
            ServerRefusedError: the server answered with another error.
            EpisodeLostError: the socket is dead, or the server speaks another protocol.
        """
        message = {"type": kind.value} if data is None else {"type": kind.value, "data": dict(data)}
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # a server without a place says so before it hears anything
                    await self._socket.send_str(json.dumps(message))
                answer = await self._socket.receive()
        except TimeoutError:
            raise EpisodeLostError(f"{self._url}: no answer to {kind.value} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeLostError(f"{self._url}: the socket broke during {kind.value}: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            why = (
                shown(str(answer.data)) if answer.type is aiohttp.WSMsgType.ERROR else f"code {self._socket.close_code}"
            )
            raise EpisodeLostError(f"{self._url}: the server closed the socket during {kind.value} ({why})")
        try:
            return content_of(answer.data, wanted, self._url)
        except ServerRefusedError as refused:
            if refused.code == ErrorCode.CAPACITY_REACHED:
                raise CapacityError(refused.message, retry_after_s=_RETRY_AFTER_S) from refused
            raise

    async def close(self) -> None:
        """Tell the server that the session is over, so that it frees the place at once; then close the socket."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                if not self._socket.closed:
                    await self._socket.send_str(json.dumps({"type": Message.CLOSE.value}))
                await self._socket.close()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # a server that is gone has no place to free


_MOST_CHARS = 100_000  # of an action
RESET_KEY = "reset"  # of a row: further arguments of reset
_INVALID = {"invalid_actions": 1.0}


class OpenEnvEpisode:
    """The policy's text becomes the action: the value of one field, or a JSON object where an action has several.

    Text that is no action is answered with the error, and the episode goes on. Numbers of the environment's state at
    its end are metrics.
    """

    def __init__(self, server: OpenEnvWorld) -> None:
        self._server = server
        self._session: OpenEnvSession | None = None
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
            self._session, data = await self._server.begin({"seed": seed % 2**31, **arguments})
        except ServerRefusedError as refused:
            if refused.code == ErrorCode.VALIDATION_ERROR:
                raise InvalidRequestError(f"reset was refused: {refused.message}") from refused
            raise
        self._field = await self._server.action_field()
        answer = answer_of(data, self._server.url)
        if answer.done:
            raise EpisodeLostError(f"{self._server.url}: the episode was over at its reset")
        return Observation(text=self._text(answer.observation))

    async def step(self, action: str) -> StepResult:
        assert self._session is not None, "stepped before reset, or after the end"
        config = self._server.config
        try:
            payload = self._action(action)
        except ValueError as error:
            return StepResult(observation=f"The action must be a JSON object: {error}", metrics=_INVALID)
        try:
            data = await self._session.ask(Message.STEP, payload, Message.OBSERVATION, config.step_timeout_s)
        except ServerRefusedError as refused:
            if refused.code == ErrorCode.VALIDATION_ERROR:
                return StepResult(observation=f"The action was refused: {refused.message}", metrics=_INVALID)
            raise
        answer = answer_of(data, self._server.url)
        self._was_paid = self._was_paid or answer.reward is not None
        if answer.done and not self._was_paid:
            raise EpisodeLostError(f"{self._server.url}: the episode ended, and none of its steps told a reward")
        return StepResult(
            observation=self._text(answer.observation),
            reward=answer.reward or 0.0,
            done=answer.done,
            status=EndStatus.COMPLETED if answer.done else "",
            metrics=await self._state() if answer.done else {},
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._server.end(session)

    def _action(self, text: str) -> dict[str, Any]:
        """Raises ``ValueError`` for text that is no action."""
        sendable = text[:_MOST_CHARS].encode(errors="replace").decode()
        if self._field is not None:
            return {self._field: sendable}
        action = json.loads(sendable)
        if not isinstance(action, dict):
            raise ValueError(f"it is a {type(action).__name__}")
        return action

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The configured field; else the only text of the observation; else all of it as JSON."""
        field = self._server.config.observation
        if field is not None:
            if field not in observation:
                raise EpisodeLostError(
                    f"{self._server.url}: the observation has no {field!r} (envgateway.openenv.*.observation); it has "
                    f"{', '.join(observation) or 'nothing'}"
                )
            value = observation[field]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(dict(observation))

    async def _state(self) -> dict[str, float]:
        """Numbers of the state. The episode is over and paid: without an answer they are left out."""
        assert self._session is not None
        try:
            state = await self._session.ask(Message.STATE, None, Message.STATE, self._server.config.step_timeout_s)
        except EpisodeLostError:
            return {}
        return {
            f"state_{name}": float(value)
            for name, value in state.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }


_QUESTION_S = 10.0  # a request for the schema


class OpenEnvWorld:
    """Plays each episode over a socket of its own. The server is first spoken to by the first episode."""

    is_remote = True  # the server is at fault for errors of its episodes, not the action

    def __init__(self, name: str, config: OpenEnvConfig) -> None:
        self.config = config
        self._name = name
        self._process = ServerProcess(f"envgateway.openenv.{name}", config) if config.command else None
        self.url = config.url or ""
        self._client: aiohttp.ClientSession | None = None
        self._open: set[OpenEnvSession] = set()
        self._field: str | None = None
        self._field_is_known = False

    def build(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self)

    async def begin(self, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Mapping[str, Any]]:
        try:
            return await self._begin(arguments)
        except CapacityError:
            # A server of ours that is full without a session of ours has leaked their places.
            if self._process is None or self._open:
                raise
            log.warning("openenv.leaked_places", environment=self._name)
            await self._process.restart()
            return await self._begin(arguments)

    async def action_field(self) -> str | None:
        """Raises ``InfrastructureError`` where the server does not tell the form of its actions."""
        if self.config.action is not None:
            return self.config.action
        if not self._field_is_known:
            self._field = _text_field(await self._schema())
            self._field_is_known = True
        return self._field

    async def end(self, session: OpenEnvSession) -> None:
        try:
            await session.close()
        finally:
            self._open.discard(session)

    async def close(self) -> None:
        for session in list(self._open):
            await self.end(session)
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            await self._process.close()

    async def _begin(self, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Mapping[str, Any]]:
        if self._process is not None:
            self.url = await self._process.url()
        session = await OpenEnvSession.open(self._opened(), self.url, self.config.start_timeout_s)
        self._open.add(session)
        try:
            return session, await session.ask(
                Message.RESET, arguments, Message.OBSERVATION, self.config.start_timeout_s
            )
        except BaseException:  # cancelled, too: the place must be free again
            await self.end(session)
            raise

    async def _schema(self) -> Any:
        url = f"{self.url.rstrip('/')}/schema"
        try:
            async with asyncio.timeout(_QUESTION_S), self._opened().get(url) as response:
                return (await response.json())["action"]
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise InfrastructureError(
                f"{url} does not tell the form of an action ({type(error).__name__}): name its field in "
                f"envgateway.openenv.{self._name}.action"
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
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
