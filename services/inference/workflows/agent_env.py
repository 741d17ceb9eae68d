"""``agent_env``: an episode against an environment of the gateway, as one sequence with the observations masked out.

    observation -> turn -> step -> observation -> turn -> ... until done, the last turn, or a full context

Reward of the sequence: the sum of step rewards times ``turn_discount ** turns``; a sum of at most 0.001 is a failure
and becomes ``failure_penalty``. In evaluation a rollout counts by the sum alone. An episode that is not done when the
turns or the context run out keeps what it has earned so far. A turn that is cut by its budget is acted upon like any
other: the environment says what it makes of it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.types import Purpose, StopReason, Task
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.conversation import Conversation
from services.inference.workflows.prompts import PromptSettings

FAILED_AT_MOST = 1e-3  # rewards of at most this count as nothing achieved


class AgentEnvSettings(PromptSettings):
    environment: str = "textworld"
    """The gateway's environment, such as `alfworld`, `webshop` or `textworld`."""
    max_turns: int = Field(default=15, ge=1)
    """Turns of a training episode."""
    evaluation_max_turns: int | None = Field(default=None, ge=1)
    """Turns of an evaluation episode; left out, as in training."""
    turn_discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor on the reward for every turn taken."""
    failure_penalty: float = 0.0
    """Reward of an episode that achieved nothing."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Bound of everything after the first observation; left out, the context is the bound."""


class AgentEnv:
    Settings: ClassVar[type[AgentEnvSettings]] = AgentEnvSettings

    def __init__(self, settings: AgentEnvSettings) -> None:
        self._settings = settings

    def policies(self) -> tuple[str, ...]:
        return self._settings.named_policies()

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        episode = await context.gateway.create_episode(self._settings.environment, task, context.episode_seed)
        try:
            return await self._play(episode.episode_id, episode.observation, context)
        finally:
            await context.gateway.close(episode.episode_id)

    async def _play(self, episode_id: str, observation: str, context: WorkflowContext) -> Outcome:
        settings = self._settings
        conversation = self._begin(observation, context)
        max_turns = self._max_turns(context.purpose)
        total, cut_turns, stop, metrics = 0.0, 0, StopReason.TURN_LIMIT, dict[str, float]()
        while conversation.num_turns < max_turns:
            turn = await conversation.generate()
            cut_turns += not turn.ended
            step = await context.gateway.step(episode_id, conversation.num_turns, turn.text)
            total += step.reward
            metrics = dict(step.metrics)
            if step.done:
                stop = StopReason.ENVIRONMENT
                break
            if conversation.num_turns == max_turns:
                break
            if not conversation.add({"role": "user", "content": step.observation}):
                stop = StopReason.LENGTH
                break
        achieved = total > FAILED_AT_MOST
        shaped = total * settings.turn_discount**conversation.num_turns if achieved else settings.failure_penalty
        sequence = conversation.sequence(
            reward=shaped,
            stop_reason=stop,
            metrics={
                **{f"environment_{name}": value for name, value in metrics.items()},
                "achieved": float(achieved),
                "cut_turns": float(cut_turns),
                "truncated": float(stop is StopReason.LENGTH),
            },
        )
        return Outcome(sequences=(sequence,), reward=total)

    def _begin(self, observation: str, context: WorkflowContext) -> Conversation:
        settings = self._settings
        messages = [{"role": "user", "content": observation + settings.instruction}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        return Conversation(
            context.policy(settings.policy),
            messages,
            context.sampling,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_response_tokens=settings.max_response_tokens,
            thinking=settings.thinking,
        )

    def _max_turns(self, purpose: Purpose) -> int:
        if purpose is Purpose.EVALUATION and self._settings.evaluation_max_turns is not None:
            return self._settings.evaluation_max_turns
        return self._settings.max_turns
