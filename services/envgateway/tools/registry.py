"""The gateway's tools by name: the built-in ones, and those that the recipe names by import path.

Holds the limits that all trajectories share of a tool: calls at once, time of a call, length of a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from services.common.config.envgateway import MCP
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import check_names, told
from services.common.text.tools import MalformedCall, ToolCall, cut_text
from services.common.tools import RESPONSE_CHARS, OfferedTool, ToolResult, ToolSession, check_tool
from services.envgateway.calls import THREADS, take_place


class ToolBox:
    """All tools of a gateway. ``counts`` has finished calls by status, and ``infrastructure`` for those without a
    status."""

    def __init__(self, tools: Iterable[Any], servers: Any = None) -> None:
        """``servers``: of the extra ``mcp``, whose tools are named ``mcp:SERVER``. Raises ``ConfigError`` for a tool that is none, and a
        schema that cannot be checked."""
        self.servers = servers
        tools = list(tools)
        for tool in tools:
            check_tool(tool, "envgateway.tools", in_replica=False)
        check_names([(tool.name, tool) for tool in tools], "envgateway.tools")
        self._tools = {tool.name: OfferedTool.of(tool) for tool in tools}
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return sorted([*self._tools, *(self.servers.names if self.servers else ())])

    def named(self, names: Sequence[str]) -> list[OfferedTool]:
        """Raises ``InvalidRequestError`` for a tool that the gateway does not have."""
        for name in names:
            if name not in self._tools:
                raise InvalidRequestError(f"no tool {name!r}; the gateway has {', '.join(self.names)}")
        return [self._tools[name] for name in names]

    @property
    def gauges(self) -> dict[str, float]:
        """Finished calls by status; and sessions, calls and failures of each MCP server."""
        counted = {f"tool_calls_{name}": float(n) for name, n in self.counts.items()}
        return counted | (self.servers.gauges if self.servers else {})

    async def close(self) -> None:
        """End the sessions at MCP servers."""
        if self.servers is not None:
            await self.servers.close()


log = structlog.get_logger()
_QUEUE_S = 10.0  # waiting for a place among the running calls of a tool


class GatewayToolSession(ToolSession):
    """The calls of one trajectory, within the limits that all share. Whatever a tool raises is an infrastructure failure."""

    def __init__(
        self,
        box: ToolBox,
        names: Sequence[str],
        max_chars: int | None = None,
        borrowed: Sequence[OfferedTool] = (),
        sessions: Sequence[Any] = (),
    ) -> None:
        """``names``: the tools that may be called; ``max_chars``: of a response, before the tools' own; ``borrowed``: tools of
        MCP servers, whose ``sessions`` are closed with this one.

        Raises:
            InvalidRequestError: a tool that the gateway does not have, or two of one name.
        """
        tools = [*box.named(names), *borrowed]
        super().__init__(tools, THREADS, max_chars or RESPONSE_CHARS)
        if len(self._tools) < len(tools):
            raise InvalidRequestError(f"two tools have one name among {', '.join(one.tool.name for one in tools)}")
        self._box = box
        self._sessions = sessions
        self._most = max_chars

    @classmethod
    async def open(cls, box: ToolBox, names: Sequence[str], max_chars: int | None = None) -> GatewayToolSession:
        """A session that also offers tools of MCP servers: names that begin with ``mcp:``.

        Raises:
            InvalidRequestError: as above; an MCP server that cannot be used.
            InfrastructureError, CapacityError: an MCP server does not start, or has no session free.
        """
        remote = [name for name in names if name.startswith(MCP)]
        local = [name for name in names if not name.startswith(MCP)]
        if remote and box.servers is None:
            raise InvalidRequestError(f"no MCP server {remote[0]!r}; envgateway.mcp has none")
        borrowed, sessions = await box.servers.open(remote, max_chars) if remote else ((), ())
        try:
            return cls(box, local, max_chars, borrowed, sessions)
        except BaseException:
            for session in sessions:
                await session.close()
            raise

    async def answer(self, content: str | ToolCall | MalformedCall) -> ToolResult:
        try:
            result = await super().answer(content)
        except RollmillError:
            self._box.counts["infrastructure"] += 1
            raise
        self._box.counts[result.status] += 1
        return result

    async def close(self) -> None:
        await super().close()
        for session in self._sessions:
            await session.close()

    async def _run(self, one: OfferedTool, arguments: Mapping[str, Any]) -> ToolResult:
        name, most = one.tool.name, self._most or one.max_chars
        await take_place(one.running, _QUEUE_S, f"no call of the tool {name} ended within {_QUEUE_S:g} s")
        try:
            result = await super()._run(one, arguments)
        except DeadlineError as error:
            raise InfrastructureError(error.message) from error
        except RollmillError:
            raise
        except (Exception, SystemExit) as error:  # a user's tool may raise anything: told, and never a reward
            log.warning("tool.failed", tool=name, exc_info=error)
            raise InfrastructureError(f"the tool {name} raised {told(error)}") from error
        finally:
            one.running.release()
        return ToolResult(status=result.status, text=cut_text(result.text, most))
