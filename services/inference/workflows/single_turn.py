"""``single_turn``: one prompt, one generation, one reward."""

from __future__ import annotations

from typing import ClassVar

from services.common.records.types import StopReason, Task
from services.common.telemetry.metrics import RolloutKey
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.codegen.program_prompts import asking_for_program
from services.inference.workflows.conversation import Conversation
from services.inference.workflows.prompts import PromptSettings, build_messages
from services.inference.workflows.rewards import build_grader


class SingleTurnSettings(PromptSettings):
    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""
    programs: bool = False
    """Ask for a program, as `codegen_verifier` asks its coder: the row's tests decide whether the program
    reads stdin or has a function of some name."""


class SingleTurn:
    Settings: ClassVar[type[SingleTurnSettings]] = SingleTurnSettings

    def __init__(self, settings: SingleTurnSettings) -> None:
        self._settings = settings
        self._grade = build_grader(settings.reward)

    def policies(self) -> tuple[str, ...]:
        return self._settings.named_policies()

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        messages = build_messages(self._settings, task)
        if self._settings.programs:
            messages = asking_for_program(messages, task)
        conversation = Conversation(
            context.policy(self._settings.policy),
            messages,
            context.sampling,
            max_prompt_tokens=self._settings.max_prompt_tokens,
            thinking=self._settings.thinking,
        )
        turn = await conversation.generate()
        reward = await self._grade(context.gateway, task, turn.text)
        sequence = conversation.sequence(
            reward=reward.value,
            stop_reason=StopReason.STOP if turn.ended else StopReason.LENGTH,
            metrics={
                RolloutKey.TRUNCATED.value: float(not turn.ended),
                **reward.metrics,
            },
        )
        return Outcome(sequences=(sequence,), reward=reward.value)
