"""``tool_use``: assistant turns with Hermes tool calls, until a turn calls no tool.

    prompt -> turn --no call--------------------------------------> end: no_call
               |---cut by a budget-------------------------------> end: length
               |---the last allowed turn (its call is not run)----> end: turn_limit
               `---call -> run -> tool message ----does not fit--> end: tool_response
                               `--- fits -> next turn

The text between the tags is Python code (``format: code``) or one JSON object {name, arguments}
(``format: json``). A malformed call is answered with its decode error, so that the policy can correct itself; only
the first call of a turn is run. The reward is computed on the text of the last turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.config.recipe import Recipe
from services.common.records.dataset_rows import BuiltInTool
from services.common.records.types import StopReason, Task
from services.common.telemetry.metrics import RolloutKey
from services.common.text.tool_calls import (
    MalformedCall,
    ToolStatistics,
    ToolStatus,
    cut_text,
    find_call,
    parse_json_call,
)
from services.common.tools import ToolResult
from services.inference.workflows.base import Gateway, Outcome, WorkflowContext
from services.inference.workflows.conversation import Conversation, Turn
from services.inference.workflows.prompts import PromptSettings, build_messages
from services.inference.workflows.rewards import build_grader
from services.inference.workflows.tools.toolset import (
    OpenTools,
    build_tools,
    check_servers,
    execution_result,
    opened,
    remote_names,
)

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
