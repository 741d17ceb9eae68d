"""One session at an OpenEnv server: a WebSocket that lives as long as the episode.

A socket that cannot be opened has taken no turn, and another attempt may succeed. A socket that breaks, or is silent for too
long, has lost the episode with the state that the server held for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from services.common.aio import backoff
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.envs.base import EpisodeLostError
from services.envgateway.envs.openenv.protocol import ErrorCode, Message, ServerRefusedError, content_of, shown

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
