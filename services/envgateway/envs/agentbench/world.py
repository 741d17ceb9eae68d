"""State shared by the episodes of one AgentBench server: address, connections and protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from services.common.config.processes.environments import AgentBenchConfig
from services.common.errors import InfrastructureError
from services.envgateway.envs.agentbench import talk
from services.envgateway.envs.agentbench.adapter import AdapterServer
from services.envgateway.envs.agentbench.classic import ClassicServer
from services.envgateway.envs.agentbench.episode import AgentBenchEpisode
from services.envgateway.envs.agentbench.http import HttpConnection
from services.envgateway.envs.agentbench.messages import Index

log = structlog.get_logger()


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
            reply = await talk.ask(self._http, path)
            if reply.status == 200 and isinstance(reply.json, dict):
                return protocol
        raise InfrastructureError(f"{self._config.url} is no AgentBench server: it answered {reply.status}")
