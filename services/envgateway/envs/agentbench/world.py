"""State shared by the episodes of one AgentBench server: address, connections and protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from services.common.config.processes.environments import AgentBenchConfig
from services.common.errors import InfrastructureError, InvalidRequestError
from services.envgateway.envs.agentbench.adapter import AdapterServer
from services.envgateway.envs.agentbench.classic import ClassicServer
from services.envgateway.envs.agentbench.http import HttpConnection
from services.envgateway.envs.agentbench.messages import Index
from services.envgateway.envs.agentbench.protocol import AgentBenchServer, ContentRefusedError, Session, sendable
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult

log = structlog.get_logger()


class AgentBenchEpisode:
    """One episode. A task's row names its sample by ``index``."""

    def __init__(self, find_server: Callable[[], Awaitable[AgentBenchServer]]) -> None:
        self._find_server = find_server
        self._server: AgentBenchServer | None = None
        self._session: Session | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Reset. The server draws the task; the seed is not used."""
        index = task.get("index")
        if isinstance(index, bool) or not isinstance(index, int | str):
            raise InvalidRequestError("the task names no sample: it needs `index`, a number or a name")
        self._server = await self._find_server()
        opening = await self._server.start(index)
        self._session = opening.session
        text = "\n\n".join(message["content"] for message in opening.messages)
        return Observation(text=text, messages=opening.messages)

    async def step(self, action: str) -> StepResult:
        assert self._server is not None and self._session is not None, "stepped before reset, or after the end"
        try:
            turn = await self._server.interact(self._session, sendable(action))
        except ContentRefusedError as refused:
            await self.close()
            return StepResult(observation=refused.message, done=True, status=EndStatus.INVALID_ACTION)
        except EpisodeLostError:
            await self.close()  # some servers keep counting sessions at which they failed
            raise
        if turn.done:
            self._session = None  # the server has forgotten the session
        return StepResult(observation=turn.text, reward=turn.reward, done=turn.done, status=turn.status)

    async def close(self) -> None:
        session, self._session = self._session, None
        if self._server is not None and session is not None:
            await self._server.cancel(session)


class AgentBenchWorld:
    """An indexed world (see ``envs/base.py``). The server is first spoken to by the first episode."""

    is_remote = True  # the server is at fault for errors of its episodes, not the action

    def __init__(self, config: AgentBenchConfig) -> None:
        self._config = config
        self._http = HttpConnection(config.url, config.connections)
        self._server: ClassicServer | AdapterServer | None = None
        self._finding = asyncio.Lock()

    async def server(self) -> ClassicServer | AdapterServer:
        """Raises ``InfrastructureError`` when the server does not answer; the next episode asks again."""
        async with self._finding:
            if self._server is None:
                self._server = await self._find()
            return self._server

    async def indices(self) -> Sequence[Index]:
        return await (await self.server()).indices()

    def build(self) -> AgentBenchEpisode:
        return AgentBenchEpisode(self.server)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await self._http.close()

    async def _find(self) -> ClassicServer | AdapterServer:
        protocol: str = self._config.protocol
        if protocol == "auto":
            protocol = await self._ask_protocol()
            log.info("agentbench.found", url=self._config.url, protocol=protocol)
        if protocol == "classic":
            return ClassicServer(self._http, self._config)
        return AdapterServer(self._http, self._config)

    async def _ask_protocol(self) -> str:
        """A server that speaks both is taken for a controller, which refuses two turns at once."""
        for protocol, path in (("classic", "list_workers"), ("adapter", "task/info")):
            reply = await self._http.ask(path)
            if reply.status == 200 and isinstance(reply.json, dict):
                return protocol
        raise InfrastructureError(f"{self._config.url} is no AgentBench server: it answered {reply.status}")
