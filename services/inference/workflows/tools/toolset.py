"""The tools that ``tool_use`` offers: built-in ones and those of MCP servers, whose calls go to the gateway, and those of
``services.common.tools`` that ``workflow.settings.tools`` names by import path.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.common.config.processes.mcp import MCP, split_name
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.records.types import Task
from services.common.system.threads import DaemonThreads
from services.common.text.tool_calls import ToolStatus, shown_output, status_of_program
from services.common.text.tool_schema import problem_with
from services.common.tools import (
    DEFAULT_TIMEOUT_S,
    AnyTool,
    StatefulTool,
    Tool,
    ToolError,
    ToolResult,
    ToolState,
    load_tools,
    schema_of,
)
from services.common.user_code import check_names, extras_of
from services.inference.workflows.base import Execution, Gateway
from services.inference.workflows.tools.gateway_tools import GatewayTool, GatewayTools


class OpenTools:
    """The tools of one rollout; a state is made at its tool's first call and closed with the rollout."""

    def __init__(self, tools: Mapping[str, AnyTool], task: Task, seed: int, remote: GatewayTools | None = None) -> None:
        self._tools = tools
        self._task = task
        self._seed = seed
        self._states: dict[str, ToolState] = {}
        self._remote = remote
        self._remote_names: set[str] = set()
        self.schemas = [schema_of(tool) for tool in tools.values()]

    async def open(self, gateway: Gateway) -> None:
        """Open the remote tools, which may need their server.

        Raises:
            ConfigError: one has the name of another tool.
        """
        if self._remote is None:
            return
        for schema in await self._remote.open(gateway):
            name = schema["function"]["name"]
            if name in self._tools:
                raise ConfigError(f"{_WHERE}: two tools are named {name!r}: write a prefix for the MCP server")
            self._remote_names.add(name)
            self.schemas.append(dict(schema))

    @property
    def names(self) -> list[str]:
        return [schema["function"]["name"] for schema in self.schemas]

    def problem_with(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """The error in the arguments of a call. Those of a remote tool are checked where it runs."""
        return None if name in self._remote_names else problem_with(arguments, self._tools[name].parameters)

    async def call(self, name: str, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        """``name`` is one of the tools; the arguments match its schema."""
        if name in self._remote_names:
            assert self._remote is not None
            return await self._remote.call(name, arguments, gateway)
        tool = self._tools[name]
        limit_s: float | None = getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S)
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                said = await _run(self._opened(name, tool).call, arguments, gateway=gateway)
        except ToolError as error:
            return ToolResult(text=f"Error: {error}", status=ToolStatus.TOOL_ERROR)
        except TimeoutError:
            if limit_s is None or not scope.expired():
                raise
            return ToolResult(text=f"TimeoutError: stopped after {limit_s:g} s", status=ToolStatus.TIME_LIMIT)
        return said if isinstance(said, ToolResult) else ToolResult(text=str(said))

    async def close(self, gateway: Gateway) -> None:
        for state in self._states.values():
            await _run(state.close, gateway=gateway)
        if self._remote is not None:
            await self._remote.close(gateway)

    def _opened(self, name: str, tool: AnyTool) -> Tool | ToolState:
        if not isinstance(tool, StatefulTool):
            return tool
        if name not in self._states:
            offered = {"task": self._task, "seed": self._seed}
            self._states[name] = tool.open(**{key: offered[key] for key in extras_of(tool.open, tuple(offered))})
        return self._states[name]


async def _run(function: Callable[..., Any], *arguments: Any, gateway: Gateway) -> Any:
    """Call, with the gateway if the function takes one: an async function here, a plain one in a thread."""
    extras = {"gateway": gateway} if extras_of(function, ("gateway",)) else {}
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **extras)
    result = await _THREADS.run(functools.partial(function, *arguments, **extras))
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def opened(
    tools: Mapping[str, AnyTool],
    task: Task,
    seed: int,
    gateway: Gateway,
    remote: Sequence[str] = (),
    max_chars: int = 256,
) -> AsyncIterator[OpenTools]:
    """The tools of a rollout, closed at its end. ``remote``: names of tools at MCP servers, whose results have at most
    ``max_chars`` characters."""
    rollout = OpenTools(tools, task, seed, GatewayTools(remote, task, seed, max_chars) if remote else None)
    try:
        await rollout.open(gateway)
        yield rollout
    finally:
        await rollout.close(gateway)


class PythonWithStandardIo:
    """Runs a program with the given standard input; the value of a trailing expression is printed, too."""

    name = "python_code_with_standard_io"
    description = (
        "Execute Python code with the given standard input and return what it prints. "
        "The value of a trailing expression is printed as in a notebook."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The Python code to execute."},
            "input": {"type": "string", "description": "What the code reads from standard input."},
        },
        "required": ["code", "input"],
    }
    timeout_s = None  # the gateway holds its time

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        stdin = str(arguments["input"]).encode("utf-8", errors="replace")
        execution = await gateway.execute_code(str(arguments["code"]), stdin=stdin, print_trailing_expression=True)
        return execution_result(execution)


class JupyterCode:
    """Runs cells in a process of the gateway that lives as long as the rollout."""

    name = "jupyter_code"
    description = (
        "Execute a cell of Python code and return what it prints. Variables, functions and imports "
        "stay for later calls. The value of a trailing expression is printed as in a notebook."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code of the cell."}},
        "required": ["code"],
    }
    timeout_s = None  # the gateway holds its time

    def open(self, task: Task, seed: int) -> GatewayTool:
        return GatewayTool(self.name, GatewayTools([self.name], task, seed, _WHOLE_CHARS))


_WHERE = "workflow.settings.tools"
_WHOLE_CHARS = 100_000
_THREADS = DaemonThreads(16)  # for tools that are plain functions

TOOLS: dict[str, str] = {
    "python_code_with_standard_io": "services.inference.workflows.tools.toolset:PythonWithStandardIo",
    "jupyter_code": "services.inference.workflows.tools.toolset:JupyterCode",
}


def remote_names(names: Sequence[str]) -> list[str]:
    """Those of MCP servers, which the gateway offers."""
    return [name for name in names if name.startswith(MCP)]


def check_servers(names: Sequence[str], recipe: Recipe) -> None:
    """Raises ``ConfigError`` for an MCP server that the recipe does not have."""
    servers = {} if recipe.envgateway is None else recipe.envgateway.mcp
    for name in names:
        server, _ = split_name(name)
        if server not in servers:
            alike = difflib.get_close_matches(server, servers, n=1)
            hint = f"did you mean '{MCP}{alike[0]}'?" if alike else f"write envgateway.mcp.{server}: {{command: [...]}}"
            raise ConfigError(
                f"{_WHERE} has {name!r}, and envgateway.mcp has {', '.join(servers) or 'no server'}: {hint}"
            )


def build_tools(names: Sequence[str]) -> dict[str, AnyTool]:
    """The tools of a recipe by their names, without those of MCP servers. Raises ``ConfigError`` for an unknown tool and for
    two tools of one name."""
    names = [name for name in names if not name.startswith(MCP)]
    for name in names:
        if name not in TOOLS and ":" not in name:
            raise ConfigError(
                f"{_WHERE}: no tool {name!r}; write one of {', '.join(TOOLS)}, an import path, or {MCP}SERVER for the tools of an "
                "MCP server"
            )
    tools = load_tools([TOOLS.get(name, name) for name in names], _WHERE, in_replica=True)
    check_names([(tool.name, tool) for tool in tools], _WHERE)
    return {tool.name: tool for tool in tools}


def execution_result(execution: Execution) -> ToolResult:
    """The tool result for a program: its output, then its error."""
    status = status_of_program(execution.status)
    assert status is not None, "an execution has no verdict on a case"
    text = shown_output(
        status, execution.stdout, execution.stderr, wall_s=execution.wall_time_s, detail=execution.detail
    )
    return ToolResult(text=text, status=status)
