"""Defines a tool: a name, a description, a JSON schema for its arguments, and a call.

A tool is a decorated function, or a class with the same parts:

    @tool
    async def capital(country: str) -> str:
        "The capital of a country."

    class Capital:
        name = "capital"
        description = "The capital of a country."
        parameters = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}

        async def call(self, arguments: Mapping[str, Any]) -> ToolResult | str: ...

One object serves all trajectories. A tool with a state per trajectory has ``open`` instead of ``call``; the object that
``open`` returns has ``call`` and ``close``. A plain ``call`` runs in a thread. A tool may have ``timeout_s`` (seconds;
None for no limit).

A recipe names a tool by import path, at one of two places: ``envgateway.tools.paths`` (runs in the gateway), or
``workflow.settings.tools`` (runs in the replica). In the replica ``open``, ``call`` and ``close`` may also take ``gateway``,
``task`` and ``seed``. Both run the calls of a trajectory in a ``ToolSession``.

    ToolError             the tool cannot do the request: shown to the policy, counted as its failure
    InfrastructureError,  the machinery failed or is full: no result, the call did not happen and may be repeated
    CapacityError
    anything else         a fault of the tool: an infrastructure failure in the gateway, a failed rollout in the replica
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Union, overload

import structlog

from services.common.dataset_rows import BuiltInTool
from services.common.errors import ConfigError
from services.common.importing import check_call, extras_of, load_object, place_of
from services.common.system.threads import DaemonThreads
from services.common.text.tools import (
    ArgumentSchema,
    MalformedCall,
    ToolCall,
    ToolStatistics,
    ToolStatus,
    cut_text,
    parse_json_call,
)

log = structlog.get_logger()
DEFAULT_TIMEOUT_S = 30.0
CONCURRENCY = 64  # calls of one tool that run at once in the gateway, where the tool says no other number
RESPONSE_CHARS = 256  # of a response, where the task says no other number
REPLICA_EXTRAS = ("gateway", "task", "seed")  # that functions of a tool may take in a replica
_CLOSE_S = 4.0  # of one tool's state


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The status of a call, and the text for the policy. ``status`` is a ``ToolStatus``, or a countable word of the
    tool's own.

    >>> ToolResult(text="42").status
    <ToolStatus.OK: 'ok'>
    """

    text: str
    status: str = ToolStatus.OK


class ToolError(Exception):
    """Raised by a tool that cannot do the request; the policy is shown its text."""


class Tool(Protocol):
    """A tool; one call is like another. ``parameters`` is the JSON Schema of an object, as ``ArgumentSchema`` takes it."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def call(self) -> Callable[..., Awaitable[ToolResult | str] | ToolResult | str]:
        """``call(arguments)``; the arguments match the schema."""
        ...


def schema_of(tool: Any) -> dict[str, Any]:
    """The description of a tool for policies, in the style of OpenAI."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


class FunctionTool:
    """A function as a tool. The schema comes from its annotations, the description from its docstring."""

    def __init__(
        self, function: Callable[..., Any], name: str, timeout_s: float | None, concurrency: int | None
    ) -> None:
        self.function = function
        self.name = name
        self.description = " ".join(inspect.cleandoc(function.__doc__ or "").split())
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.takes_gateway = "gateway" in inspect.signature(function).parameters
        if not self.description:
            raise TypeError(f"{place_of(function)}the tool {name} has no docstring: describe the tool there")
        self.parameters = parameters_of(function)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function itself."""
        return self.function(*arguments, **named)

    def call(self, arguments: Mapping[str, Any], gateway: Any = None) -> Any:
        """What the function returns for arguments that match the schema; of an async function, something to await."""
        return self.function(**arguments, **({"gateway": gateway} if self.takes_gateway else {}))


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S, concurrency: int | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    concurrency: int | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function a tool that policies can call: ``@tool``, or ``@tool(name=..., timeout_s=...)``.

    Parameters are annotated with ``str``, ``int``, ``float``, ``bool``, ``list[...]``, ``dict``, ``Literal[...]`` or a
    union of these; ``Annotated[str, "the description"]`` describes one. A parameter named ``gateway`` is not shown to
    the policy; its value is the environment gateway, in a tool that ``workflow.settings.tools`` names.

    Raises:
        TypeError: no docstring, or a parameter whose annotation has no JSON schema, with file and line.
    """

    def make(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name or function.__name__, timeout_s, concurrency)

    return make if function is None else make(function)


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments; raises ``TypeError`` for one that has none."""
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "gateway":
            continue
        if name not in hints or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(
                f"{place_of(function)}the parameter {parameter} of the tool {function.__name__} needs a name and a type: write "
                f"`{name}: str`, or another of str, int, float, bool, list, dict, Literal"
            )
        try:
            properties[name] = _schema(hints[name])
        except TypeError as error:
            raise TypeError(
                f"{place_of(function)}the parameter {name} of the tool {function.__name__}: {error}"
            ) from None
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


_PLAIN = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


def _schema(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        described = [text for text in inner[1:] if isinstance(text, str)]
        return {**_schema(inner[0]), **({"description": described[0]} if described else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": True}
    if hint not in _PLAIN:
        raise TypeError(f"{hint} has no JSON schema here: write one of str, int, float, bool, list, dict, Literal")
    return {"type": _PLAIN[hint], **({"additionalProperties": True} if hint is dict else {})}


def load_tools(paths: Sequence[str], where: str = "envgateway.tools", *, in_replica: bool = False) -> list[Any]:
    """The tools of import paths: one object of each class, and decorated functions as they are. Loaded at start: a typo
    costs a second, not a run.

    Raises:
        ConfigError: with the path, the fault, and file and line.
    """
    tools: list[Any] = []
    for path in paths:
        found: Any = load_object(path)
        if inspect.isfunction(found):
            raise ConfigError(f"{place_of(found)}{where}: {path} is a plain function: write `@rollmill.tool` above it")
        if inspect.isclass(found):
            check_call(found, path, "def __init__(self)")
        made = found() if inspect.isclass(found) else found
        check_tool(made, where, in_replica=in_replica)
        tools.append(made)
    return tools


def check_tool(tool: Any, where: str, *, in_replica: bool) -> None:
    """Raises ``ConfigError``, with file and line, for an object that is no tool, or a tool that needs a parameter of
    the replica."""
    kind, place = type(tool).__name__, place_of(tool)
    for attribute in ("name", "description"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise ConfigError(f'{place}{where}: {kind}.{attribute} is missing or no text: write `{attribute} = "..."`')
    call, opening = getattr(tool, "call", None), getattr(tool, "open", None)
    if not callable(call) and not callable(opening):
        raise ConfigError(
            f"{place}{where}: {tool.name} has neither call() nor open(): write `async def call(self, arguments)`"
        )
    try:
        ArgumentSchema(getattr(tool, "parameters", None))
    except ValueError as error:
        raise ConfigError(f"{place}{where}: {tool.name}: {error}") from error
    if getattr(tool, "takes_gateway", False) and not in_replica:
        raise ConfigError(
            f"{place}{where}: {tool.name} takes `gateway`, which a tool of workflow.settings.tools gets: name it there"
        )
    is_stateful = callable(opening) and not callable(call)
    function: Any = opening if is_stateful else call
    extras = dict.fromkeys(extras_of(function, REPLICA_EXTRAS) if in_replica else ())
    if is_stateful:
        check_call(function, f"{tool.name}.open", "def open(self)", keywords=extras)
    else:
        wanted = "async def call(self, arguments)"
        check_call(function, f"{tool.name}.call", wanted, "arguments", keywords=extras)


class PythonDescription:
    """What policies are told of the tools that run one program a call."""

    name = BuiltInTool.PYTHON_WITH_INPUT.value
    description = (
        "Execute Python code and return what it prints. The value of a trailing expression is printed as in a notebook."
    )
    properties: Mapping[str, Any] = {
        "code": {"type": "string", "description": "The Python code to execute."},
        "input": {"type": "string", "description": "What the code reads from standard input."},
    }
    parameters: Mapping[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    timeout_s = None  # the sandbox holds the program's


class JupyterDescription:
    """What policies are told of ``jupyter_code``."""

    name = BuiltInTool.JUPYTER.value
    description = (
        "Execute a cell of Python code and return what it prints. Variables, functions and imports stay for later calls. "
        "The value of a trailing expression is printed as in a notebook."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code of the cell."}},
        "required": ["code"],
    }
    timeout_s = None  # the sandbox holds the cell's


# --- The tool calls of one trajectory: reading them, checking them, running them, counting them.


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool with what its calls need. ``schema``: None where the place that runs the tool checks the arguments."""

    tool: Any
    schema: ArgumentSchema | None
    timeout_s: float | None  # None: the tool keeps its own
    max_chars: int = RESPONSE_CHARS
    running: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENCY))

    @classmethod
    def of(cls, tool: Any) -> OfferedTool:
        """A tool of the user or a built-in one, with its own limits."""
        return cls(
            tool=tool,
            schema=ArgumentSchema(tool.parameters),
            timeout_s=getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S),
            running=asyncio.Semaphore(getattr(tool, "concurrency", None) or CONCURRENCY),
        )


class ToolSession:
    """One trajectory's calls, one after the other. ``close`` ends the state that tools keep for the trajectory."""

    def __init__(self, tools: Iterable[OfferedTool], threads: DaemonThreads, max_chars: int, **given: Any) -> None:
        """``threads`` run plain functions. ``max_chars``: of an error that a call is answered with. ``given``: what functions of
        tools may take by these names."""
        self._tools = {one.tool.name: one for one in tools}
        self._threads = threads
        self._max_chars = max_chars
        self._given = given
        self.states: dict[str, Any] = {}  # that tools keep for the trajectory
        self.schemas = [schema_of(one.tool) for one in self._tools.values()]
        self.statistics = ToolStatistics()

    async def answer(self, content: str | ToolCall | MalformedCall) -> ToolResult:
        """Answer a call, or the text between its tags: one JSON object ``{"name": ..., "arguments": {...}}``.

        Raises:
            InfrastructureError, CapacityError: the call did not happen, is not counted, and may be repeated.
        """
        began = time.perf_counter()
        call = parse_json_call(content) if isinstance(content, str) else content
        one = None if isinstance(call, MalformedCall) else self._tools.get(call.name)
        if isinstance(call, MalformedCall):
            result = self._error(ToolStatus.MALFORMED_CALL, f"malformed tool call: {call.error}")
        elif one is None:
            there_is = ", ".join(self._tools)
            result = self._error(ToolStatus.UNKNOWN_TOOL, f"no tool {call.name!r}; there is {there_is}")
        elif one.schema is not None and (problem := one.schema.problem_with(call.arguments)) is not None:
            result = self._error(ToolStatus.INVALID_ARGUMENTS, problem)
        else:
            result = await self._run(one, call.arguments)
        self.statistics.count(result.status, time.perf_counter() - began, one.tool.name if one is not None else "")
        return result

    async def close(self) -> None:
        states, self.states = self.states, {}
        for name, state in states.items():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._call(state.close)
            except Exception as error:  # a user's tool may raise anything; the others are closed all the same
                log.warning("tool.close_failed", tool=name, exc_info=error)

    def _error(self, status: ToolStatus, text: str) -> ToolResult:
        return ToolResult(status=status, text=cut_text(f"Error: {text}", self._max_chars))

    async def _run(self, one: OfferedTool, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of a call whose arguments fit."""
        scope = asyncio.timeout(one.timeout_s)
        try:
            async with scope:
                said = await self._call(self._opened(one.tool).call, arguments)
        except ToolError as error:
            return ToolResult(status=ToolStatus.TOOL_ERROR, text=f"Error: {error}")
        except TimeoutError:
            if not scope.expired():
                raise
            limit = f"TimeoutError: stopped after {one.timeout_s:g} s"
            return ToolResult(status=ToolStatus.TIME_LIMIT, text=limit)
        return said if isinstance(said, ToolResult) else ToolResult(text=str(said))

    def _opened(self, tool: Any) -> Any:
        """What has the tool's ``call``: the tool, or its state of this trajectory."""
        if hasattr(tool, "call"):
            return tool
        if tool.name not in self.states:
            self.states[tool.name] = tool.open(**self._extras(tool.open))
        return self.states[tool.name]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._threads.call(function, *arguments, **self._extras(function))

    def _extras(self, function: Callable[..., Any]) -> dict[str, Any]:
        return {name: self._given[name] for name in extras_of(function, tuple(self._given))} if self._given else {}
