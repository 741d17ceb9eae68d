"""OpenEnv's messages: what goes over the socket of one episode, and how its answers are read.

    {"type": "reset", "data": {"seed": 1, ...}}  ->  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {the action}}       ->  the same
    {"type": "state"}                            ->  {"type": "state", "data": {...}}
    {"type": "close"}                            ->  the end of the socket
    any of them                                  ->  {"type": "error", "data": {"message", "code"}}

An answer of another form is of another version of the protocol: the episode is lost, and never has a reward.

A session is a WebSocket that lives as long as the episode. A socket that cannot be opened has taken no turn, and another attempt may succeed. A socket that breaks, or is silent for too
long, has lost the episode with the state that the server held for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.common.aio import backoff
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.envs.base import EpisodeLostError

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
