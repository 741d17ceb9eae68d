"""What a tool is: a name, a description, a JSON schema for its arguments, and an asynchronous call.

    class Capital:
        name = "capital"
        description = "The capital of a country."
        parameters = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}

        async def call(self, arguments: Mapping[str, Any]) -> str: ...

One object serves all trajectories. A tool with a state per trajectory has ``open`` instead of ``call``. Either may say
``timeout_s`` and ``concurrency``; the config's ``tools.limits`` goes before them. ``call`` may be a plain function: it is
run in a thread, and its time-out then ends the waiting, not the thread.

    ToolError             the tool cannot do what it was asked: told to the policy, counted as its failure
    InfrastructureError,  the machinery failed or is full: no result, the call did not happen and may be repeated
    CapacityError
    StateLostError        the machinery has lost a state: the trajectory cannot go on
    anything else         a fault of the tool: logged, and an infrastructure failure
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from services.common.errors import InfrastructureError
from services.common.tool_results import ToolStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """How a call ended, and what the policy is shown.

    >>> ToolResult(text="42").status
    <ToolStatus.OK: 'ok'>
    """

    text: str
    status: ToolStatus = ToolStatus.OK


class ToolError(Exception):
    """Raised by a tool that cannot do what it was asked; its text is what the policy is shown."""


class StateLostError(InfrastructureError):
    """The machinery has lost what a tool kept for a trajectory: repeating the call does not bring it back."""


class ToolDescription(Protocol):
    """What every tool says of itself."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of an object, in the part that ``services.common.tool_schema`` checks."""
        ...


class Tool(ToolDescription, Protocol):
    """One call is like another."""

    def call(self, arguments: Mapping[str, Any]) -> Awaitable[ToolResult | str] | ToolResult | str:
        """``arguments`` match the schema."""
        ...


class ToolState(Protocol):
    """What a trajectory has of a tool; made at its first call, closed with it."""

    def call(self, arguments: Mapping[str, Any]) -> Awaitable[ToolResult | str] | ToolResult | str: ...

    def close(self) -> Awaitable[None] | None: ...


@runtime_checkable
class StatefulTool(Protocol):
    """One call knows what earlier ones of its trajectory did."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def open(self) -> ToolState: ...


AnyTool = Tool | StatefulTool


def schema_of(tool: ToolDescription) -> dict[str, Any]:
    """As policies are shown it, OpenAI style."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
