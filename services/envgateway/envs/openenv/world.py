"""State shared by the episodes of one OpenEnv server: its address or its process, its sessions, and the form of its actions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import structlog

from services.common.config.processes.environments import OpenEnvConfig
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.envs.openenv.episode import OpenEnvEpisode
from services.envgateway.envs.openenv.process import ServerProcess
from services.envgateway.envs.openenv.protocol import Message
from services.envgateway.envs.openenv.session import OpenEnvSession

log = structlog.get_logger()

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
            connector = aiohttp.TCPConnector(limit=self.config.connections)
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
