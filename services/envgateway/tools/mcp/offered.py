"""The tools of MCP servers in one trajectory's tool session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.config.processes.envgateway import ToolConfig
from services.common.config.processes.mcp import MCP, split_name
from services.common.errors import InvalidRequestError
from services.common.tools import ToolResult
from services.envgateway.tools.base import RegisteredTool
from services.envgateway.tools.mcp.server import McpServer, McpSession, Offer


class McpTool:
    """A server's tool, bound to a trajectory's session."""

    def __init__(self, session: McpSession, offer: Offer, max_chars: int) -> None:
        self.name = offer.name
        self.description = offer.description
        self.parameters = offer.parameters
        self.problem_with = offer.schema.problem_with
        self._session, self._offer, self._max_chars = session, offer, max_chars

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._session.call(self._offer, arguments, self._max_chars)


class McpTools:
    """The tools that a trajectory asked for by names that begin with ``MCP``. ``close`` ends its sessions."""

    def __init__(self, tools: Sequence[RegisteredTool], sessions: Sequence[McpSession]) -> None:
        self.tools = tools
        self._sessions = sessions

    @classmethod
    async def open(cls, servers: Mapping[str, McpServer], names: Sequence[str], max_chars: int | None) -> McpTools:
        """
        Raises:
            InvalidRequestError: an unknown server or tool; a server that cannot be used.
            InfrastructureError, CapacityError: of ``McpServer.open_session``.
        """
        sessions: dict[str, McpSession] = {}
        tools: dict[str, RegisteredTool] = {}
        try:
            for name in names:
                server_name, tool_name = split_name(name)
                server = servers.get(server_name)
                if server is None:
                    known = ", ".join(f"{MCP}{one}" for one in servers) or "none"
                    raise InvalidRequestError(f"no MCP server {name!r}; envgateway.mcp has {known}")
                if server_name not in sessions:
                    sessions[server_name] = await server.open_session()
                for offer in server.offers(tool_name):
                    if offer.name in tools:
                        raise InvalidRequestError(
                            f"{name}: there are two tools named {offer.name!r}: name single tools ({MCP}SERVER/TOOL), or write "
                            f"{server.where}.prefix"
                        )
                    tools[offer.name] = _registered(server, sessions[server_name], offer, max_chars)
        except BaseException:
            for session in sessions.values():
                await session.close()
            raise
        return cls(list(tools.values()), list(sessions.values()))

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


def _registered(server: McpServer, session: McpSession, offer: Offer, max_chars: int | None) -> RegisteredTool:
    most = max_chars or server.config.max_chars
    return RegisteredTool(
        tool=McpTool(session, offer, most),
        config=ToolConfig(max_chars=most),
        timeout_s=None,  # the session's own
        running=server.running,
        has_state=False,
    )
