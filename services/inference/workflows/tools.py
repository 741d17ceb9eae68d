"""The tools that ``tool_use`` offers: a JSON schema for the policy, and a call that goes to the gateway.

A tool of your own is a class with ``schema`` and ``call``, named by import path in ``workflow.settings.tools``. One with a
state per rollout has ``open`` instead of ``call``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from services.common.errors import ConfigError, MillraceError
from services.common.importing import load_object
from services.common.tool_results import ToolStatus, shown_output
from services.common.tool_schema import check_schema
from services.common.types import Task
from services.inference.workflows.base import Execution, ExecutionStatus, Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the policy is shown, and how the call ended: "ok", or a countable kind of failure (see ``ToolStatus``)."""

    text: str
    kind: str = "ok"


class Tool(Protocol):
    """Raises ``InfrastructureError`` when the machinery failed; every other failure is a result."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI style: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
        ...

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult: ...


class OpenTool(Protocol):
    """What a rollout has of a tool: its state, or the tool itself."""

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult: ...


@runtime_checkable
class StatefulTool(Protocol):
    """One call knows what earlier ones of its rollout did."""

    @property
    def schema(self) -> Mapping[str, Any]: ...

    def open(self, task: Task, seed: int) -> ToolState: ...


class ToolState(OpenTool, Protocol):
    async def close(self, gateway: Gateway) -> None: ...


AnyTool = Tool | StatefulTool


class OpenTools:
    """The tools of one rollout; a state is made at its tool's first call and closed with the rollout."""

    def __init__(self, tools: Mapping[str, AnyTool], task: Task, seed: int) -> None:
        self._tools = tools
        self._task = task
        self._seed = seed
        self._states: dict[str, ToolState] = {}

    async def call(self, name: str, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        """``name`` is one of the tools; the arguments match its schema."""
        tool = self._tools[name]
        if not isinstance(tool, StatefulTool):
            return await tool.call(arguments, gateway)
        if name not in self._states:
            self._states[name] = tool.open(self._task, self._seed)
        return await self._states[name].call(arguments, gateway)

    async def close(self, gateway: Gateway) -> None:
        for state in self._states.values():
            await state.close(gateway)


@asynccontextmanager
async def opened(tools: Mapping[str, AnyTool], task: Task, seed: int, gateway: Gateway) -> AsyncIterator[OpenTools]:
    """What a rollout may call, until it is over."""
    rollout = OpenTools(tools, task, seed)
    try:
        yield rollout
    finally:
        await rollout.close(gateway)


class PythonWithStandardIo:
    """Runs a program with the given standard input; the value of a trailing expression is printed, too."""

    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": "python_code_with_standard_io",
            "description": "Execute Python code with the given standard input and return what it prints. "
            "The value of a trailing expression is printed as in a notebook.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "The Python code to execute."},
                    "input": {"type": "string", "description": "What the code reads from standard input."},
                },
                "required": ["code", "input"],
            },
        },
    }

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        stdin = str(arguments["input"]).encode("utf-8", errors="replace")
        execution = await gateway.execute_code(str(arguments["code"]), stdin=stdin, print_trailing_expression=True)
        return execution_result(execution)


class JupyterCode:
    """Runs cells in a process of the gateway that lives as long as the rollout."""

    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": "jupyter_code",
            "description": "Execute a cell of Python code and return what it prints. Variables, functions and imports "
            "stay for later calls. The value of a trailing expression is printed as in a notebook.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The Python code of the cell."}},
                "required": ["code"],
            },
        },
    }

    def open(self, task: Task, seed: int) -> GatewayTool:
        return GatewayTool("jupyter_code", task, seed)


class GatewayTool:
    """One rollout's calls of a tool that the gateway keeps a state for: an episode of its environment ``tools``."""

    def __init__(self, name: str, task: Task, seed: int) -> None:
        settings = {"tools": [name], "max_response_chars": _WHOLE_CHARS}  # the workflow cuts it
        self._task = Task(task_id=task.task_id, data={"environment": settings})
        self._name = name
        self._seed = seed
        self._episode_id = ""
        self._turns = 0

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        if not self._episode_id:
            self._episode_id = (await gateway.create_episode("tools", self._task, self._seed)).episode_id
        self._turns += 1
        action = json.dumps({"name": self._name, "arguments": arguments})
        step = await gateway.step(self._episode_id, self._turns, action)
        prefix = "tool_status_"
        kinds = [name.removeprefix(prefix) for name in step.metrics if name.startswith(prefix)]
        return ToolResult(text=step.observation, kind=kinds[0])

    async def close(self, gateway: Gateway) -> None:
        if self._episode_id:
            try:
                await gateway.close(self._episode_id)
            except MillraceError:  # its lease ends it, and the rollout has its result
                return


_WHOLE_CHARS = 100_000

TOOLS: dict[str, str] = {
    "python_code_with_standard_io": "services.inference.workflows.tools:PythonWithStandardIo",
    "jupyter_code": "services.inference.workflows.tools:JupyterCode",
}


def build_tools(names: list[str]) -> dict[str, AnyTool]:
    """The tools of a recipe by the name in their schema."""
    tools: dict[str, AnyTool] = {}
    for name in names:
        path = TOOLS.get(name, name)
        if ":" not in path:
            raise ConfigError(
                f"workflow.settings.tools: no tool {name!r}; write one of {', '.join(TOOLS)}, or an import path"
            )
        tool: AnyTool = load_object(path)()
        try:
            check_schema(tool.schema["function"]["parameters"])
        except ValueError as error:
            raise ConfigError(f"workflow.settings.tools: {name}: {error}") from error
        tools[str(tool.schema["function"]["name"])] = tool
    return tools


_KINDS = {
    ExecutionStatus.OK: ToolStatus.OK,
    ExecutionStatus.RUNTIME_ERROR: ToolStatus.PROGRAM_ERROR,
    ExecutionStatus.TIME_LIMIT: ToolStatus.TIME_LIMIT,
    ExecutionStatus.MEMORY_LIMIT: ToolStatus.MEMORY_LIMIT,
    ExecutionStatus.OUTPUT_LIMIT: ToolStatus.OUTPUT_LIMIT,
    ExecutionStatus.INVALID_REQUEST: ToolStatus.INVALID_ARGUMENTS,
}


def execution_result(execution: Execution) -> ToolResult:
    """What a policy is told about a program: its output, then what went wrong."""
    kind = _KINDS[execution.status]
    text = shown_output(kind, execution.stdout, execution.stderr, wall_s=execution.wall_time_s, detail=execution.detail)
    return ToolResult(text=text, kind=kind)
