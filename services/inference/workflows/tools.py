"""The tools that ``tool_use`` offers: a JSON schema for the policy, and a call that goes to the gateway.

A tool of your own is a class with ``schema`` and ``call``, named by import path in ``workflow.settings.tools``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import ConfigError
from services.common.importing import load_object
from services.inference.workflows.base import Execution, ExecutionStatus, Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the policy is shown, and how the call ended: "ok", or a countable kind of failure."""

    text: str
    kind: str = "ok"

    @property
    def failed(self) -> bool:
        return self.kind != "ok"


class Tool(Protocol):
    """Raises ``InfrastructureError`` when the machinery failed; every other failure is a result."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI style: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
        ...

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult: ...


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


TOOLS: dict[str, str] = {
    "python_code_with_standard_io": "services.inference.workflows.tools:PythonWithStandardIo",
}


def build_tools(names: list[str]) -> dict[str, Tool]:
    """The tools of a recipe by the name in their schema."""
    tools: dict[str, Tool] = {}
    for name in names:
        path = TOOLS.get(name, name)
        if ":" not in path:
            raise ConfigError(
                f"workflow.settings.tools: no tool {name!r}; write one of {', '.join(TOOLS)}, or an import path"
            )
        tool: Tool = load_object(path)()
        tools[str(tool.schema["function"]["name"])] = tool
    return tools


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, or None: missing, unknown, or text that is no text."""
    parameters = tool.schema["function"]["parameters"]
    known: Mapping[str, Any] = parameters["properties"]
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"unknown argument {name!r}"
        if known[name].get("type") == "string" and not isinstance(value, str):
            return f"argument {name!r} must be a string"
    return None


def execution_result(execution: Execution) -> ToolResult:
    """What a policy is told about a program: its output, then what went wrong."""
    status = execution.status
    parts = [execution.stdout.rstrip()]
    if status is ExecutionStatus.RUNTIME_ERROR:
        parts.append(execution.stderr.rstrip() or "the program failed")
    elif status is ExecutionStatus.TIME_LIMIT:
        parts.append(f"TimeoutError: stopped after {execution.wall_time_s:.1f} s")
    elif status is ExecutionStatus.MEMORY_LIMIT:
        parts.append("MemoryError: the program used too much memory")
    elif status is ExecutionStatus.OUTPUT_LIMIT:
        parts.append("Error: the program printed too much")
    elif status is ExecutionStatus.INVALID_REQUEST:
        parts.append(f"Error: {execution.detail or 'the program cannot be run'}")
    text = "\n".join(part for part in parts if part)
    return ToolResult(text=text or "(no output)", kind=status.value)
