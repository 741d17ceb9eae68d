"""``agent_env``: plays an episode in an environment of the gateway; one sequence, with the observations masked out.

    observation -> turn -> step -> observation -> turn -> ... until done, the last turn, or a full context

Reward of the sequence: the return, the sum of step rewards of any sign. Two settings shape the reward; both are off by
default: ``turn_discount`` multiplies the return by ``turn_discount ** turns``; ``failure_penalty`` replaces a return of at
most ``failure_threshold``. The rollout's outcome, which evaluation averages, is the return alone. An unfinished episode at
the end of the turns or of the context keeps its return so far; an environment that is scored at its end (``harbor``) gets
an empty action then, which ends the episode. A turn that is cut by its budget is sent to the environment
like any other.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.harbor.places import SCORED_AT_END
from services.common.records.types import Purpose, StopReason, Task
from services.common.telemetry.metrics import RolloutKey
from services.inference.workflows.base import Episode, Outcome, WorkflowContext
from services.inference.workflows.conversation import Conversation
from services.inference.workflows.prompts import PromptSettings, with_instruction, with_last_text


class AgentEnvSettings(PromptSettings):
    environment: str = "textworld"
    """The gateway's environment, such as `alfworld`, `webshop` or `textworld`."""
    max_turns: int = Field(default=15, ge=1)
    """Turns of a training episode."""
    evaluation_max_turns: int | None = Field(default=None, ge=1)
    """Turns of an evaluation episode; left out, as in training."""
    turn_discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor on the return for every turn taken; negative returns shrink, too."""
    failure_penalty: float | None = None
    """Reward of an episode whose return is at most `failure_threshold`; left out, its return is its reward."""
    failure_threshold: float = 1e-3
    """The largest return of a failed episode."""
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
            return await self._play(episode, context)
        finally:
            await context.gateway.close(episode.episode_id)

    async def _play(self, episode: Episode, context: WorkflowContext) -> Outcome:
        settings = self._settings
        conversation = self._begin(episode, context)
        max_turns = self._max_turns(context.purpose)
        total, cut_turns, stop, metrics = 0.0, 0, StopReason.TURN_LIMIT, dict[str, float]()
        while conversation.num_turns < max_turns:
            turn = await conversation.generate()
            cut_turns += not turn.ended
            step = await context.gateway.step(episode.episode_id, conversation.num_turns, turn.text)
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
        if stop is not StopReason.ENVIRONMENT and settings.environment in SCORED_AT_END:
            step = await context.gateway.step(episode.episode_id, conversation.num_turns + 1, "")
            total += step.reward
            metrics = dict(step.metrics)
        achieved = total > settings.failure_threshold
        shaped = total * settings.turn_discount**conversation.num_turns
        if settings.failure_penalty is not None and not achieved:
            shaped = settings.failure_penalty
        sequence = conversation.sequence(
            reward=shaped,
            stop_reason=stop,
            metrics={
                **{f"environment_{name}": value for name, value in metrics.items()},
                "return": total,
                "achieved": float(achieved),
                "cut_turns": float(cut_turns),
                RolloutKey.TRUNCATED.value: float(stop is StopReason.LENGTH),
            },
        )
        return Outcome(sequences=(sequence,), reward=total)

    def _begin(self, episode: Episode, context: WorkflowContext) -> Conversation:
        settings = self._settings
        messages = episode.opening()
        messages = with_last_text(messages, with_instruction(messages[-1]["content"], settings.instruction))
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
