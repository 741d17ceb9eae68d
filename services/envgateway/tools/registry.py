"""The gateway's tools by name: the built-in ones, and those that the recipe names by import path.

Holds the limits that all trajectories share of a tool: calls at once, time of a call, length of a result.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from services.common import tools
from services.common.config.processes.envgateway import ToolConfig
from services.common.config.processes.mcp import MCP
from services.common.errors import ConfigError, InvalidRequestError
from services.common.text.tool_calls import cut_text
from services.common.tools import DEFAULT_TIMEOUT_S, AnyTool, StatefulTool, ToolResult, check_tool
from services.common.user_code import check_names
from services.envgateway.tools.base import RegisteredTool

if TYPE_CHECKING:
    from services.envgateway.tools.mcp.server import McpServer

DEFAULT_CONCURRENCY = 64


class ToolBox:
    """All tools of a gateway. ``counts`` has finished calls by status, and ``infrastructure`` for those without a
    status."""

    def __init__(
        self,
        tools: Iterable[AnyTool],
        limits: Mapping[str, ToolConfig] | None = None,
        servers: Mapping[str, McpServer] | None = None,
    ) -> None:
        """``servers``: those whose tools are named ``mcp:SERVER``.

        Raises:
            ConfigError: a tool that is none, a schema that cannot be checked, or limits of no tool.
        """
        self.servers = servers or {}
        limits = limits or {}
        tools = list(tools)
        for tool in tools:
            check_tool(tool, "envgateway.tools", in_replica=False)
        check_names([(tool.name, tool) for tool in tools], "envgateway.tools")
        self._tools = {tool.name: _registered(tool, limits.get(tool.name, ToolConfig())) for tool in tools}
        for name in limits:
            if name not in self._tools:
                raise ConfigError(f"envgateway.tools.limits.{name}: no such tool; there is {', '.join(self.names)}")
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return sorted([*self._tools, *(f"{MCP}{name}" for name in self.servers)])

    def named(self, names: Sequence[str]) -> list[RegisteredTool]:
        """Raises ``InvalidRequestError`` for a tool that the gateway does not have."""
        for name in names:
            if name not in self._tools:
                raise InvalidRequestError(f"no tool {name!r}; the gateway has {', '.join(self.names)}")
        return [self._tools[name] for name in names]

    @property
    def gauges(self) -> dict[str, float]:
        """Finished calls by status; and sessions, calls and failures of each MCP server."""
        counted = {f"tool_calls_{name}": float(n) for name, n in self.counts.items()}
        return counted | {name: n for server in self.servers.values() for name, n in server.gauges.items()}

    async def close(self) -> None:
        """End the sessions at MCP servers."""
        for server in self.servers.values():
            await server.close()


def load_tools(paths: Iterable[str]) -> list[AnyTool]:
    """One object of each class. Loaded at start: a typo costs a second, not a run.

    Raises:
        ConfigError: names the path and the fault.
    """
    return tools.load_tools(list(paths), "envgateway.tools", in_replica=False)


def cut_result(result: ToolResult, config: ToolConfig, max_chars: int | None = None) -> ToolResult:
    """The part of a result that the policy sees; ``max_chars`` has precedence over the config's."""
    most = config.max_chars if max_chars is None else max_chars
    return ToolResult(status=result.status, text=cut_text(result.text, most, config.cut))


def _registered(tool: AnyTool, config: ToolConfig) -> RegisteredTool:
    own_s = getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S)
    concurrency: int = config.concurrency or getattr(tool, "concurrency", None) or DEFAULT_CONCURRENCY
    return RegisteredTool(
        tool=tool,
        config=config,
        timeout_s=None if own_s is None else config.timeout_s or own_s,
        running=asyncio.Semaphore(concurrency),
        has_state=isinstance(tool, StatefulTool),
    )
