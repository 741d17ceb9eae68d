"""The tools that ``tool_use`` offers: built-in ones and those of MCP servers, whose calls go to the gateway, and those of
``services.common.tools`` that ``workflow.settings.tools`` names by import path.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.config.envgateway import MCP, split_name
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInTool
from services.common.errors import ConfigError, RollmillError
from services.common.importing import check_names, extras_of
from services.common.records import Purpose, StopReason, Task
from services.common.system.threads import DaemonThreads
from services.common.telemetry.metrics import RolloutKey
from services.common.text.tools import (
    STATUS_METRIC,
    MalformedCall,
    ToolStatistics,
    ToolStatus,
    cut_text,
    find_call,
    parse_json_call,
    problem_with,
    shown_output,
    status_of_program,
)
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
from services.inference.workflows.base import (
    Conversation,
    Execution,
    Gateway,
    Outcome,
    PromptSettings,
    Turn,
    WorkflowContext,
    build_grader,
    build_messages,
)

# --- Tools that the gateway runs for one rollout: an episode of its environment ``tools``.


class GatewayTools:
    """Opened at the first call, or by ``open``, which returns the schemas; ``close`` in any case."""

    def __init__(self, names: Sequence[str], task: Task, seed: int, max_chars: int) -> None:
        """``names``: tools of the gateway, or ``mcp:SERVER``; ``max_chars``: of a result."""
        settings = {"tools": list(names), "max_response_chars": max_chars}
        self._task = Task(task_id=task.task_id, data={"environment": settings})
        self._seed = seed
        self._episode_id = ""
        self._turns = 0

    async def open(self, gateway: Gateway) -> Sequence[Mapping[str, Any]]:
        """Begin the episode; returns the tools' schemas, in the style of OpenAI."""
        episode = await gateway.create_episode("tools", self._task, self._seed)
        self._episode_id = episode.episode_id
        return episode.tools

    async def call(self, name: str, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        """The gateway checks the name and the arguments, too."""
        if not self._episode_id:
            await self.open(gateway)
        self._turns += 1
        action = json.dumps({"name": name, "arguments": arguments})
        step = await gateway.step(self._episode_id, self._turns, action)
        kinds = [name.removeprefix(STATUS_METRIC) for name in step.metrics if name.startswith(STATUS_METRIC)]
        return ToolResult(text=step.observation, status=kinds[0])

    async def close(self, gateway: Gateway) -> None:
        if self._episode_id:
            try:
                await gateway.close(self._episode_id)
            except RollmillError:  # the lease ends the episode, and the rollout has its result
                return


class GatewayTool:
    """One tool of the gateway with a state, as the rollout's own."""

    def __init__(self, name: str, tools: GatewayTools) -> None:
        self._name = name
        self._tools = tools

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        return await self._tools.call(self._name, arguments, gateway)

    async def close(self, gateway: Gateway) -> None:
        await self._tools.close(gateway)


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
    "python_code_with_standard_io": "services.inference.workflows.tools:PythonWithStandardIo",
    "jupyter_code": "services.inference.workflows.tools:JupyterCode",
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


# --- ``tool_use``: assistant turns with Hermes tool calls, until a turn calls no tool.


_STOP_REASONS = {
    "no_call": StopReason.STOP,
    "length": StopReason.LENGTH,
    "turn_limit": StopReason.TURN_LIMIT,
    "tool_response": StopReason.LENGTH,
}


class ToolUseSettings(PromptSettings):
    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""
    format: Literal["json", "code"] = "json"
    """The text between the tool_call tags: a JSON object {name, arguments}, or the Python code itself."""
    tools: list[str] = Field(default=[BuiltInTool.PYTHON_WITH_INPUT.value], min_length=1)
    """With `format: json`: tools by name or import path (`package.module:Class`); `mcp:SERVER` for the tools of an MCP server
    of `envgateway.mcp`, `mcp:SERVER/TOOL` for one of them."""
    max_turns: int = Field(default=5, ge=1)
    """Assistant turns; the call of the last one is not executed."""
    max_tool_response_chars: int = Field(default=256, ge=16)
    """A longer tool response is cut in the middle."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Bound of everything after the prompt, tool responses included; left out, the context is the bound."""
    assistant_prefill: str = ""
    """Text that every assistant turn begins with, such as `<reason>`: the policy goes on from there. Neither trained
    nor graded."""
    print_trailing_expression: bool = True
    """With `format: code`: also print the value of a trailing expression, as a notebook does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialogue:
    """A finished tool loop, not graded yet."""

    conversation: Conversation
    turns: tuple[Turn, ...]  # at least one
    stop_reason: StopReason
    metrics: Mapping[str, float]


class ToolUse:
    Settings: ClassVar[type[ToolUseSettings]] = ToolUseSettings

    def __init__(self, settings: ToolUseSettings) -> None:
        self._settings = settings
        self._grade = build_grader(settings.reward)
        self._tools = build_tools(settings.tools) if settings.format == "json" else {}
        self._remote = remote_names(settings.tools) if settings.format == "json" else []

    def policies(self) -> tuple[str, ...]:
        return self._settings.named_policies()

    def check(self, recipe: Recipe) -> None:
        """Raises ``ConfigError`` for an MCP server that the recipe's gateway lacks."""
        check_servers(self._remote, recipe)

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        played = await self.play(task, context)
        reward = await self._grade(context.gateway, task, played.turns[-1].text)
        sequence = played.conversation.sequence(
            reward=reward.value,
            stop_reason=played.stop_reason,
            metrics={**reward.metrics, **played.metrics},
        )
        return Outcome(sequences=(sequence,), reward=reward.value)

    async def play(self, task: Task, context: WorkflowContext) -> ToolDialogue:
        """Take turns until one calls no tool or a budget ends the dialogue, without grading."""
        statistics = ToolStatistics()
        turns: list[Turn] = []
        seed, most = context.episode_seed, self._settings.max_tool_response_chars
        async with opened(self._tools, task, seed, context.gateway, self._remote, most) as tools:
            conversation = self._begin(task, context, tools.schemas)
            end = await self._play(conversation, context.gateway, tools, statistics, turns)
        return ToolDialogue(
            conversation=conversation,
            turns=tuple(turns),
            stop_reason=_STOP_REASONS[end],
            metrics={
                RolloutKey.TRUNCATED.value: float(end == "length"),
                **{f"end_{name}": float(name == end) for name in _STOP_REASONS},
                **statistics.metrics(),
            },
        )

    def _begin(self, task: Task, context: WorkflowContext, schemas: Sequence[Mapping[str, Any]]) -> Conversation:
        policy = context.policy(self._settings.policy)
        listed_by_template = bool(schemas) and policy.chat.lists_tools
        suffix = describe_tools(schemas) if schemas and not listed_by_template else ""
        return Conversation(
            policy,
            build_messages(self._settings, task, system_suffix=suffix),
            context.sampling,
            tools=schemas if listed_by_template else None,
            max_prompt_tokens=self._settings.max_prompt_tokens,
            max_response_tokens=self._settings.max_response_tokens,
            thinking=self._settings.thinking,
            assistant_prefill=self._settings.assistant_prefill,
        )

    async def _play(
        self,
        conversation: Conversation,
        gateway: Gateway,
        tools: OpenTools,
        statistics: ToolStatistics,
        turns: list[Turn],
    ) -> str:
        """Take turns, at least one; returns why the rollout ended."""
        while True:
            turn = await conversation.generate()
            turns.append(turn)
            if not turn.ended:
                return "length"
            call = find_call(turn.text)
            if call is None:
                return "no_call"
            if conversation.num_turns >= self._settings.max_turns:
                return "turn_limit"
            began = time.perf_counter()
            result = await self._answer(call, gateway, tools)
            statistics.count(result.status, time.perf_counter() - began)
            text = cut_text(result.text, self._settings.max_tool_response_chars)
            if not conversation.add({"role": "tool", "content": text}):
                return "tool_response"

    async def _answer(self, content: str | MalformedCall, gateway: Gateway, tools: OpenTools) -> ToolResult:
        if isinstance(content, MalformedCall):
            return _malformed(content)
        if self._settings.format == "code":
            return execution_result(
                await gateway.execute_code(
                    content.strip(), print_trailing_expression=self._settings.print_trailing_expression
                )
            )
        call = parse_json_call(content)
        if isinstance(call, MalformedCall):
            return _malformed(call)
        if call.name not in tools.names:
            known = ", ".join(tools.names)
            return ToolResult(text=f"Error: no tool {call.name!r}; there is {known}", status=ToolStatus.UNKNOWN_TOOL)
        problem = tools.problem_with(call.name, call.arguments)
        if problem is not None:
            return ToolResult(text=f"Error: {problem}", status=ToolStatus.INVALID_ARGUMENTS)
        return await tools.call(call.name, call.arguments, gateway)


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The system text for chat templates that do not list tools themselves."""
    listed = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        "You may call tools. Their JSON schemas:\n<tools>\n"
        f"{listed}\n</tools>\n"
        'To call one, write a JSON object between tags: <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    )


def _malformed(call: MalformedCall) -> ToolResult:
    return ToolResult(text=f"Error: malformed tool call: {call.error}", status=ToolStatus.MALFORMED_CALL)


# --- ``tool_math``: math problems with a code tool, in rStar2's form, for GRPO-RoC.


SYSTEM = """You solve math problems together with a user who asks them. First reason about the problem, between <reason> and \
</reason>, and use the tools where computing is safer than reasoning. Then give your answer, between <answer> and </answer>: \
<reason>your reasoning</reason> <answer>your answer</answer>."""
INSTRUCTION = "\n\nPut the final answer into \\boxed{} inside the answer tags."


class ToolMathSettings(ToolUseSettings):
    system: str | None = SYSTEM
    """System turn before a prompt that has none."""
    instruction: str = INSTRUCTION
    """Text after the last user turn."""
    assistant_prefill: str = "<reason>"
    """Text that every assistant turn begins with, excluded from training."""
    answer_tag: str = Field(default="answer", min_length=1)
    """The tag that must enclose the answer, once."""
    max_prompt_tokens: int | None = 2048
    """A longer prompt is a failed rollout (PROMPT_TOO_LONG)."""
    max_response_tokens: int | None = 8192
    """Bound of everything after the prompt in training, tool responses included."""
    evaluation_max_response_tokens: int | None = 30720
    """The same in evaluation."""


class ToolMath:
    Settings: ClassVar[type[ToolMathSettings]] = ToolMathSettings

    def __init__(self, settings: ToolMathSettings) -> None:
        self._settings = settings
        self._grade = build_grader(settings.reward)
        in_evaluation = settings.model_copy(update={"max_response_tokens": settings.evaluation_max_response_tokens})
        self._dialogues = {Purpose.TRAIN: ToolUse(settings), Purpose.EVALUATION: ToolUse(in_evaluation)}

    def policies(self) -> tuple[str, ...]:
        return self._settings.named_policies()

    def check(self, recipe: Recipe) -> None:
        """Raises ``ConfigError`` for an MCP server that the recipe's gateway lacks."""
        self._dialogues[Purpose.TRAIN].check(recipe)

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        played = await self._dialogues[context.purpose].play(task, context)
        reward = await self._grade(context.gateway, task, played.turns[-1].text)
        calls, failed = played.metrics["tool_calls"], played.metrics["tool_errors"]
        errors = tool_error_share(calls, failed)
        shape = format_term([turn.text for turn in played.turns], self._settings.answer_tag)
        sequence = played.conversation.sequence(
            reward=reward.value,
            stop_reason=played.stop_reason,
            metrics={
                **reward.metrics,
                "tool_error_share": errors,
                "format_penalty": shape,
                "penalty": errors + shape,
                **played.metrics,
            },
        )
        return Outcome(sequences=(sequence,), reward=reward.value)


def tool_error_share(calls: float, failed: float) -> float:
    """Failed tool calls over tool calls; 0.5 when no tool was used.

    >>> tool_error_share(0, 0), tool_error_share(4, 1)
    (0.5, 0.25)
    """
    return failed / calls if calls else 0.5


def format_term(turns: list[str], tag: str) -> float:
    """1 when the answer tag is missing or not closed in order; more than one answer costs per assistant turn.

    >>> format_term(["<answer>1</answer>"], "answer"), format_term(["1"], "answer")
    (0.0, 1.0)
    """
    text = "".join(turns)
    before, *blocks = text.split(f"<{tag}>")
    if not blocks or f"</{tag}>" in before or any(block.count(f"</{tag}>") != 1 for block in blocks):
        return 1.0
    return min((len(blocks) - 1) / len(turns), 1.0)
