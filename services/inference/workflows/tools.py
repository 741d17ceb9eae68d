"""The tools that ``tool_use`` offers: built-in ones and those of MCP servers, whose calls go to the gateway, and those of
``services.common.tools`` that ``workflow.settings.tools`` names by import path.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.config.envgateway import MCP, split_name
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInTool
from services.common.errors import ConfigError, RollmillError
from services.common.importing import check_names
from services.common.records import Purpose, StopReason, Task
from services.common.system.threads import DaemonThreads
from services.common.telemetry.metrics import RolloutKey
from services.common.text.tools import (
    STATUS_METRIC,
    MalformedCall,
    cut_text,
    find_call,
    shown_output,
    status_of_program,
)
from services.common.tools import (
    JupyterDescription,
    OfferedTool,
    PythonDescription,
    ToolResult,
    ToolSession,
    load_tools,
)
from services.inference.workflows.base import (
    Conversation,
    Execution,
    Gateway,
    Outcome,
    Turn,
    WorkflowContext,
    build_messages,
)
from services.inference.workflows.single import Workflow, WorkflowSettings

# --- Tools that the gateway runs for one rollout: an episode of its environment ``tools``.


class GatewayTools:
    """Opened at the first call, or by ``open``; ``close`` in any case."""

    def __init__(self, gateway: Gateway, names: Sequence[str], task: Task, seed: int, max_chars: int) -> None:
        """``names``: tools of the gateway, or ``mcp:SERVER``; ``max_chars``: of a result."""
        settings = {"tools": list(names), "max_response_chars": max_chars}
        self._gateway = gateway
        self._task = Task(task_id=task.task_id, data={"environment": settings})
        self._seed = seed
        self._episode_id = ""
        self._turns = 0

    async def open(self) -> Sequence[OfferedTool]:
        """Begin the episode; returns its tools, whose arguments the gateway checks."""
        episode = await self._gateway.create_episode("tools", self._task, self._seed)
        self._episode_id = episode.episode_id
        return [
            OfferedTool(tool=GatewayTool(self, **schema["function"]), schema=None, timeout_s=None)
            for schema in episode.tools
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if not self._episode_id:
            await self.open()
        self._turns += 1
        action = json.dumps({"name": name, "arguments": arguments})
        step = await self._gateway.step(self._episode_id, self._turns, action)
        kinds = [name.removeprefix(STATUS_METRIC) for name in step.metrics if name.startswith(STATUS_METRIC)]
        return ToolResult(text=step.observation, status=kinds[0])

    async def close(self) -> None:
        if self._episode_id:
            with contextlib.suppress(RollmillError):  # the lease ends the episode, and the rollout has its result
                await self._gateway.close(self._episode_id)


class GatewayTool:
    """One tool of the gateway."""

    def __init__(self, tools: GatewayTools, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        self.description = description
        self.parameters = parameters
        self._tools = tools

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._tools.call(self.name, arguments)

    async def close(self) -> None:
        """For a tool that is its own state."""
        await self._tools.close()


@asynccontextmanager
async def opened(
    tools: Sequence[OfferedTool], remote: Sequence[str], task: Task, seed: int, gateway: Gateway, max_chars: int
) -> AsyncIterator[ToolSession]:
    """The tools of a rollout, closed at its end. ``remote``: names of tools at MCP servers, whose results have at most
    ``max_chars`` characters. Raises ``ConfigError`` where one has the name of another tool."""
    at_servers = GatewayTools(gateway, remote, task, seed, max_chars)
    try:
        offered = [*tools, *(await at_servers.open() if remote else ())]
        for twice, count in Counter(one.tool.name for one in offered).items():
            if count > 1:
                raise ConfigError(f"{_WHERE}: two tools are named {twice!r}: write a prefix for the MCP server")
        session = ToolSession(offered, _THREADS, max_chars, gateway=gateway, task=task, seed=seed)
        try:
            yield session
        finally:
            if session.states:
                await session.close()
    finally:
        if remote:
            await at_servers.close()


class PythonWithStandardIo(PythonDescription):
    """Runs a program with the given standard input; the value of a trailing expression is printed, too."""

    async def call(self, arguments: Mapping[str, Any], gateway: Gateway) -> ToolResult:
        stdin = str(arguments["input"]).encode("utf-8", errors="replace")
        execution = await gateway.execute_code(str(arguments["code"]), stdin=stdin, print_trailing_expression=True)
        return execution_result(execution)


class JupyterCode(JupyterDescription):
    """Runs cells in a process of the gateway that lives as long as the rollout."""

    def open(self, task: Task, seed: int, gateway: Gateway) -> GatewayTool:
        tools = GatewayTools(gateway, [self.name], task, seed, _WHOLE_CHARS)
        return GatewayTool(tools, self.name, self.description, self.parameters)


_WHERE = "workflow.settings.tools"
_WHOLE_CHARS = 100_000
_THREADS = DaemonThreads(16)  # for tools that are plain functions
TOOLS: dict[str, str] = {
    "python_code_with_standard_io": "services.inference.workflows.tools:PythonWithStandardIo",
    "jupyter_code": "services.inference.workflows.tools:JupyterCode",
}


def check_servers(names: Sequence[str], recipe: Recipe) -> None:
    """Raises ``ConfigError`` for an MCP server that the recipe does not have."""
    servers = (recipe.envgateway and recipe.envgateway.extra("mcp")) or {}
    for name in names:
        server, _ = split_name(name)
        if server not in servers:
            alike = difflib.get_close_matches(server, servers, n=1)
            hint = f"did you mean '{MCP}{alike[0]}'?" if alike else f"write envgateway.mcp.{server}: {{command: [...]}}"
            raise ConfigError(
                f"{_WHERE} has {name!r}, and envgateway.mcp has {', '.join(servers) or 'no server'}: {hint}"
            )


def build_tools(names: Sequence[str]) -> list[OfferedTool]:
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
    return [OfferedTool.of(tool) for tool in tools]


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


class ToolUseSettings(WorkflowSettings):
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


class ToolUse(Workflow):
    Settings: ClassVar[type[WorkflowSettings]] = ToolUseSettings

    def __init__(self, settings: ToolUseSettings) -> None:
        super().__init__(settings)
        names = settings.tools if settings.format == "json" else []
        self._tools = build_tools(names)
        self._remote = [name for name in names if name.startswith(MCP)]

    def check(self, recipe: Recipe) -> None:
        """Raises ``ConfigError`` for an MCP server that the recipe's gateway lacks."""
        check_servers(self._remote, recipe)

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        turns: list[Turn] = []
        seed, most = context.episode_seed, self.settings.max_tool_response_chars
        async with opened(self._tools, self._remote, task, seed, context.gateway, most) as tools:
            conversation = self._begin(task, context, tools.schemas)
            end = await self._play(conversation, context.gateway, tools, turns)
        reward = await self.grader(context.gateway, task, turns[-1].text)
        counted = {
            RolloutKey.TRUNCATED.value: float(end == "length"),
            **{f"end_{name}": float(name == end) for name in _STOP_REASONS},
            **tools.statistics.metrics(),
        }
        sequence = conversation.sequence(
            reward=reward.value,
            stop_reason=_STOP_REASONS[end],
            metrics={**reward.metrics, **self.penalties(counted, turns), **counted},
        )
        return Outcome(sequences=(sequence,), reward=reward.value)

    def penalties(self, counted: Mapping[str, float], turns: Sequence[Turn]) -> Mapping[str, float]:
        """Further metrics of a finished dialogue."""
        return {}

    def most_response_tokens(self, purpose: Purpose) -> int | None:
        found: int | None = self.settings.max_response_tokens
        return found

    def _begin(self, task: Task, context: WorkflowContext, schemas: Sequence[Mapping[str, Any]]) -> Conversation:
        policy = context.policy(self.settings.policy)
        listed_by_template = bool(schemas) and policy.chat.lists_tools
        suffix = describe_tools(schemas) if schemas and not listed_by_template else ""
        return Conversation(
            policy,
            build_messages(self.settings, task, system_suffix=suffix),
            context.sampling,
            tools=schemas if listed_by_template else None,
            max_prompt_tokens=self.settings.max_prompt_tokens,
            max_response_tokens=self.most_response_tokens(context.purpose),
            thinking=self.settings.thinking,
            assistant_prefill=self.settings.assistant_prefill,
        )

    async def _play(self, conversation: Conversation, gateway: Gateway, tools: ToolSession, turns: list[Turn]) -> str:
        """Take turns, at least one; returns why the rollout ended."""
        while True:
            turn = await conversation.generate()
            turns.append(turn)
            if not turn.ended:
                return "length"
            call = find_call(turn.text)
            if call is None:
                return "no_call"
            if conversation.num_turns >= self.settings.max_turns:
                return "turn_limit"
            result = await self._answer(call, gateway, tools)
            text = cut_text(result.text, self.settings.max_tool_response_chars)
            if not conversation.add({"role": "tool", "content": text}):
                return "tool_response"

    async def _answer(self, content: str | MalformedCall, gateway: Gateway, tools: ToolSession) -> ToolResult:
        if self.settings.format == "json" or isinstance(content, MalformedCall):
            return await tools.answer(content)
        began = time.perf_counter()
        echo = self.settings.print_trailing_expression
        result = execution_result(await gateway.execute_code(content.strip(), print_trailing_expression=echo))
        tools.statistics.count(result.status, time.perf_counter() - began)
        return result


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The system text for chat templates that do not list tools themselves."""
    listed = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        "You may call tools. Their JSON schemas:\n<tools>\n"
        f"{listed}\n</tools>\n"
        'To call one, write a JSON object between tags: <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    )


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


class ToolMath(ToolUse):
    Settings: ClassVar[type[WorkflowSettings]] = ToolMathSettings

    def penalties(self, counted: Mapping[str, float], turns: Sequence[Turn]) -> Mapping[str, float]:
        errors = tool_error_share(counted["tool_calls"], counted["tool_errors"])
        shape = format_term([turn.text for turn in turns], self.settings.answer_tag)
        return {"tool_error_share": errors, "format_penalty": shape, "penalty": errors + shape}

    def most_response_tokens(self, purpose: Purpose) -> int | None:
        if purpose is Purpose.TRAIN:
            return super().most_response_tokens(purpose)
        found: int | None = self.settings.evaluation_max_response_tokens
        return found


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
