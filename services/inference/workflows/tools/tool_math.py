"""``tool_math``: math problems with a code tool, in rStar2's form, for GRPO-RoC.

The dialogue is ``tool_use``'s, in the form reason - answer: every turn is begun for the policy with ``<reason>``, and the
answer has a tag of its own. Beside the reward each sequence carries a ``penalty`` for failed calls and bad format:

    penalty = share of tool calls that failed (0.5 when there was none) + format term
    format  = 1 when the answer tag is missing or not closed in order, else min((answer blocks - 1) / assistant turns, 1)

The structured status of the tool decides whether a call failed, never words in its output. ``batch.resample`` keeps
the right answers with the lowest penalty. Source: rStar2-Agent (arXiv 2508.20722).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.config.recipe import Recipe
from services.common.records.types import Purpose, Task
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.rewards import build_grader
from services.inference.workflows.tools.tool_use import ToolUse, ToolUseSettings

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
