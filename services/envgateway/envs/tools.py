"""Tools that the gateway runs for a policy: by JSON schema, with a deadline, a concurrency and a structured status.

Whether a call failed is its status, never a word in its output.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError
from services.envgateway.judge.records import Lane
from services.envgateway.queue.base import JobQueue
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult, ExecutionStatus


class ToolStatus(enum.StrEnum):
    """INFRA says nothing about the call: repeat it, and never count it against the policy."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    INFRA = "infra"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    status: ToolStatus
    text: str  # what the policy is shown


class Tool(Protocol):
    """One kind of call. ``InfrastructureError`` becomes status INFRA; other exceptions are bugs."""

    schema: Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
    timeout_s: float  # a backstop; a tool with limits of its own keeps them below
    concurrency: int

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult: ...


class PythonTool:
    """Runs a program in the sandbox; the value of a trailing expression is printed, too."""

    def __init__(self, queue: JobQueue, name: str, *, takes_input: bool, timeout_s: float) -> None:
        properties: dict[str, Any] = {"code": {"type": "string", "description": "The Python code to execute."}}
        if takes_input:
            properties["input"] = {"type": "string", "description": "What the code reads from standard input."}
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": name,
                "description": "Execute Python code and return what it prints. "
                "The value of a trailing expression is printed as in a notebook.",
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }
        self._name = name
        self.timeout_s = timeout_s
        self.concurrency = 1024  # the queue bounds what runs
        self._queue = queue

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        stdin = arguments.get("input", "").encode("utf-8", errors="replace")
        request = ExecutionRequest(code=arguments["code"], stdin=stdin, echo=True)
        # Without a key: two calls of the same program are two runs.
        result = await self._queue.run(request, lane=Lane.INTERACTIVE, request_id="", deadline_s=self.timeout_s)
        return _shown(result)


class ToolBox:
    """The gateway's tools by name."""

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {str(tool.schema["function"]["name"]): tool for tool in tools}
        self._running = {name: asyncio.Semaphore(tool.concurrency) for name, tool in self._tools.items()}
        self.counts: Counter[str] = Counter()

    def schemas(self, names: list[str]) -> list[Mapping[str, Any]]:
        """Raises ``InvalidRequestError`` for a tool that the gateway does not have."""
        for name in names:
            if name not in self._tools:
                raise InvalidRequestError(f"no tool {name!r}; the gateway has {', '.join(sorted(self._tools))}")
        return [self._tools[name].schema for name in names]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Always a result. A wrong name or wrong arguments are the policy's error, told in words."""
        tool = self._tools.get(name)
        problem = f"no tool {name!r}; there is {', '.join(self._tools)}" if tool is None else _wrong(tool, arguments)
        if tool is None or problem is not None:
            result = ToolResult(status=ToolStatus.ERROR, text=f"Error: {problem}")
        else:
            result = await self._run(tool, name, arguments)
        self.counts[result.status] += 1
        return result

    async def _run(self, tool: Tool, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            async with self._running[name], asyncio.timeout(tool.timeout_s):
                return await tool.call(arguments)
        except TimeoutError:
            return ToolResult(status=ToolStatus.TIMEOUT, text=f"TimeoutError: stopped after {tool.timeout_s:g} s")
        except (InfrastructureError, DeadlineError) as error:
            return ToolResult(status=ToolStatus.INFRA, text=error.message)


def _wrong(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments, or None."""
    parameters = tool.schema["function"]["parameters"]
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in parameters["properties"]:
            return f"unknown argument {name!r}"
        if parameters["properties"][name].get("type") == "string" and not isinstance(value, str):
            return f"argument {name!r} must be a string"
    return None


def _shown(result: ExecutionResult) -> ToolResult:
    """What a policy is told about a program: its output, then what went wrong."""
    status = result.status
    if status in (ExecutionStatus.INFRA_ERROR, ExecutionStatus.CANCELLED):
        return ToolResult(status=ToolStatus.INFRA, text=result.detail or status.value)
    parts = [result.stdout.decode(errors="replace").rstrip()]
    kind = ToolStatus.ERROR
    match status:
        case ExecutionStatus.OK:
            kind = ToolStatus.OK
        case ExecutionStatus.TIME_LIMIT:
            kind = ToolStatus.TIMEOUT
            parts.append(f"TimeoutError: stopped after {result.wall_s:.1f} s")
        case ExecutionStatus.MEMORY_LIMIT:
            parts.append("MemoryError: the program used too much memory")
        case ExecutionStatus.OUTPUT_LIMIT:
            parts.append("Error: the program printed too much")
        case ExecutionStatus.INVALID_REQUEST:
            parts.append(f"Error: {result.detail}")
        case _:
            parts.append(result.stderr.decode(errors="replace").rstrip() or "the program failed")
    return ToolResult(status=kind, text="\n".join(part for part in parts if part) or "(no output)")
