"""``external_agent``: an agent of any framework plays the rollout, with the endpoint as its model.

    open a session -> agent(task, base_url, session) -> its reward, or one computed on the last answer
                          |  ^
                          v  | chat completions: captured, exactly as sampled
                        endpoint -> policies

The agent is a function by import path, in this process, or a command. One that fails, asks nothing or takes too long is a
failed rollout; where the machinery failed under it, the rollout is played again, whatever the agent made of it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.threads import DaemonThreads
from services.common.types import Task
from services.inference.workflows.agent_command import AgentFailedError, run_command
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.captured import CapturedSession, Rewrites
from services.inference.workflows.rewards import build_grader

_THREADS = DaemonThreads(256)  # for agents that are plain functions; they mostly wait


class ExternalAgentSettings(Section):
    agent: str | None = None
    """Import path (`package.module:function`) of `async def agent(task, base_url, session, ...) -> float | None`. One with
    parameters `seed` (this rollout's) or `episode_seed` (the task group's) is given them."""
    command: list[str] = []
    """Instead of `agent`: a program and its arguments. It reads the task as JSON from stdin, and OPENAI_BASE_URL,
    OPENAI_API_KEY, MILLRACE_SESSION, MILLRACE_SEED and MILLRACE_EPISODE_SEED from its environment; `{"reward": ...}` as its
    last line is its reward."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    reward: str | None = None
    """What scores the last answer when the agent returns none: a reward of the gateway (`math`, `boxed`), or the import path
    of a function."""
    policy: str | None = None
    """What the model `default` is; left out, the only policy of the recipe."""
    timeout_s: float | None = Field(default=None, gt=0)
    """An agent that takes longer has failed; left out, `rollout.timeout_s` alone bounds it."""
    rewrites: Rewrites = "new_sequence"
    """A request that does not extend an earlier one, word for word, begins another sequence of the trajectory, or is
    refused."""
    client_sampling: bool = False
    """Whether temperature, top_p, top_k, min_p and seed of requests count, instead of the recipe's `sampling`. Each turn is then
    trained at the temperature and over the tokens that it was sampled with; temperature 0 is refused, except in evaluation."""
    max_sequences: int = Field(default=64, ge=1)
    """Of one trajectory; a request that would begin another is refused."""
    thinking: bool | None = None
    """Turn the thinking of the chat template on or off, where it has that (Qwen3); left out, its default."""

    @model_validator(mode="after")
    def _one_agent(self) -> ExternalAgentSettings:
        if self.agent and self.command:
            raise ValueError("set `agent` (module:function) or `command`, not both")
        return self


class ExternalAgent:
    Settings: ClassVar[type[ExternalAgentSettings]] = ExternalAgentSettings

    def __init__(self, settings: ExternalAgentSettings) -> None:
        self._settings = settings
        self._agent: Any = load_object(settings.agent) if settings.agent else None
        if self._agent is not None and not callable(self._agent):
            raise ConfigError(f"workflow.settings.agent: {settings.agent} is no function of (task, base_url, session)")
        self._takes = _parameters(self._agent) if self._agent is not None else frozenset()
        self._grade = build_grader(settings.reward) if settings.reward is not None else None

    def policies(self) -> tuple[str, ...]:
        return () if self._settings.policy is None else (self._settings.policy,)

    def check(self, recipe: Recipe) -> None:
        """Whether a recipe has what its agents need; ``ConfigError`` says what to write."""
        self._check_agent()
        for name, service in recipe.inference.items():
            if service.endpoint.port is None:
                raise ConfigError(
                    f"inference.{name}.endpoint.port is null, and the agents of external_agent reach the policies "
                    "through the endpoint: write a port there, or 0 for a free one"
                )

    def _check_agent(self) -> None:
        if self._agent is None and not self._settings.command:
            raise ConfigError("external_agent has no agent: set workflow.settings.agent or workflow.settings.command")

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        settings = self._settings
        if context.endpoint is None:
            raise ConfigError("external_agent needs the endpoint: write a port at inference.<name>.endpoint.port")
        self._check_agent()
        session = CapturedSession(
            context.policies,
            context.sampling,
            default_policy=settings.policy,
            rewrites=settings.rewrites,
            client_sampling=settings.client_sampling,
            max_sequences=settings.max_sequences,
            thinking=settings.thinking,
            purpose=context.purpose,
        )
        try:
            with context.endpoint.opened(session) as session_id:
                seeds = {"seed": context.seed, "episode_seed": context.episode_seed}
                given = await self._in_time(task.data, context.endpoint.base_url, session_id, seeds)
        except Exception:  # what broke under the agent explains what the agent raised
            if session.failure is not None:
                raise session.failure from None
            raise
        if session.failure is not None:
            raise session.failure
        if session.last is None:
            raise AgentFailedError("the agent ended without an answer of the model: there is nothing to train on")
        reward, unparsed = await self._reward(given, task, context, session.last.text)
        return Outcome(sequences=session.sequences(reward), reward=reward, metrics={"reward_unparsed": float(unparsed)})

    async def _in_time(self, task: Mapping[str, Any], base_url: str, session: str, seeds: Mapping[str, int]) -> Any:
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                if self._agent is None:
                    return await run_command(self._settings.command, task, base_url, session, seeds)
                wanted = {name: seed for name, seed in seeds.items() if name in self._takes}
                call = {"base_url": base_url, "session": session, **wanted, **self._settings.arguments}
                if inspect.iscoroutinefunction(self._agent):
                    return await self._agent(task, **call)
                # In a thread: a client that blocks must not stop the endpoint that it waits for.
                given = await _THREADS.run(lambda: self._agent(task, **call))
                return await given if inspect.isawaitable(given) else given
        except TimeoutError:
            if limit.expired():
                raise AgentFailedError(
                    f"the agent took longer than {self._settings.timeout_s:g} s (workflow.settings.timeout_s)"
                ) from None
            raise

    async def _reward(self, given: Any, task: Task, context: WorkflowContext, text: str) -> tuple[float, bool]:
        if given is not None:
            reward = float(given)
            if not math.isfinite(reward):
                raise AgentFailedError(f"the agent returned the reward {reward}; it must be a finite number")
            return reward, False
        if self._grade is None:
            raise ConfigError("the agent returned no reward and workflow.settings.reward names none")
        graded = await self._grade(context.gateway, task, text)
        return graded.value, graded.unparsed


def _parameters(agent: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(agent).parameters)
    except ValueError:  # a callable written in C says nothing of its parameters
        return frozenset()
