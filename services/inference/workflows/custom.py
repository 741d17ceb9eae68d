"""Base class of users' workflows, and a conversation that records its stop reason.

class Ask(rollmill.Workflow):
    async def run(self, task, context):
        chat = self.converse(task, context)
        await chat.respond()
        return chat.outcome(await chat.grade())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from services.common.records.types import Sequence as TokenSequence
from services.common.records.types import StopReason, Task
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Message
from services.common.user_code import place_of
from services.inference.workflows.base import Outcome, Reward, WorkflowContext
from services.inference.workflows.conversation import Conversation, Turn
from services.inference.workflows.prompts import PromptSettings, build_messages
from services.inference.workflows.rewards import build_grader


class WorkflowSettings(PromptSettings):
    """Settings of a user's workflow: those of every prompt, and a reward. Subclasses add fields with defaults."""

    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""


class Workflow:
    """Base class. A subclass writes ``async def run(self, task, context) -> Outcome``, and may have ``Settings`` of its own.

    One object per replica; ``run`` is called for many rollouts at once, so a rollout's state stays in local variables.
    """

    Settings: ClassVar[type[WorkflowSettings]] = WorkflowSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.grader = build_grader(settings.reward)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not (isinstance(cls.Settings, type) and issubclass(cls.Settings, WorkflowSettings)):
            raise TypeError(
                f"{place_of(cls)}{cls.__name__}.Settings: write `class Settings(rollmill.WorkflowSettings)`"
            )

    def policies(self) -> tuple[str, ...]:
        """The policies that the workflow uses by name; a recipe without them is refused."""
        return tuple(self.settings.named_policies())

    def converse(
        self,
        task: Task,
        context: WorkflowContext,
        *,
        policy: str | None = None,
        messages: Sequence[Message] | None = None,
        role: str = "agent",
        attempt: int = 0,
    ) -> Dialogue:
        """Begin a conversation with a policy: the settings' one unless another is named, and the task's prompt unless there
        are ``messages``.

        Raises ``PromptTooLongError`` for a prompt that does not fit, ``DatasetError`` for a row without one.
        """
        settings = self.settings
        conversation = Conversation(
            context.policy(policy or settings.policy),
            build_messages(settings, task) if messages is None else messages,
            context.sampling,
            max_prompt_tokens=settings.max_prompt_tokens,
            thinking=settings.thinking,
        )
        return Dialogue(self, task, context, conversation, role, attempt)


class Dialogue:
    """One conversation with one policy. Keeps the exact samples; derives the stop reason from the last turn."""

    def __init__(
        self,
        workflow: Workflow,
        task: Task,
        context: WorkflowContext,
        conversation: Conversation,
        role: str,
        attempt: int,
    ) -> None:
        self.conversation = conversation
        self.turns: list[Turn] = []
        self._workflow, self._task, self._context = workflow, task, context
        self._role, self._attempt = role, attempt
        self._unanswered = False  # a message was appended, and no turn followed
        self._full = False  # a message had no room
        self._graded = Reward(value=0.0)

    @property
    def text(self) -> str:
        """The policy's last turn; empty before the first."""
        return self.turns[-1].text if self.turns else ""

    async def respond(self) -> str:
        """Let the policy take a turn; returns its text."""
        turn = await self.conversation.generate()
        self.turns.append(turn)
        self._unanswered = False
        return turn.text

    def say(self, text: str, role: str = "user") -> bool:
        """Append a message for the policy. False, without appending, if the dialogue cannot go on: the last turn was cut short,
        or the context is full."""
        if self.turns and not self.turns[-1].ended:
            return False
        self._unanswered = self.conversation.add({"role": role, "content": text})
        self._full = not self._unanswered
        return self._unanswered

    async def grade(self, text: str | None = None) -> float:
        """The reward of the settings for the last turn, or for ``text``.

        Raises ``InfrastructureError`` when the grader failed: let it pass, and the rollout is played again.
        """
        reward = await self._workflow.grader(self._context.gateway, self._task, self.text if text is None else text)
        self._graded = reward
        return reward.value

    def sequence(self, reward: float, stop_reason: StopReason | None = None, **metrics: float) -> TokenSequence:
        """The record of this conversation, with its reward."""
        if self._unanswered:
            self.conversation.take_back()
        cut = self._full or not self.turns or not self.turns[-1].ended
        deduced = StopReason.LENGTH if cut else StopReason.TURN_LIMIT if self._unanswered else StopReason.STOP
        self._unanswered = False
        counted: Mapping[str, float] = {
            RolloutKey.TRUNCATED.value: float(cut),
            **self._graded.metrics,
            **metrics,
        }
        return self.conversation.sequence(
            reward=reward, stop_reason=stop_reason or deduced, metrics=counted, role=self._role, attempt=self._attempt
        )

    def outcome(self, reward: float, stop_reason: StopReason | None = None, **metrics: float) -> Outcome:
        """The outcome of a rollout that has this conversation alone. ``metrics`` are numbers of the rollout."""
        numbers = {name: float(value) for name, value in metrics.items()}
        return Outcome(sequences=(self.sequence(reward, stop_reason),), reward=reward, metrics=numbers)
