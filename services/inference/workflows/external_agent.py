"""``external_agent``: an agent of any framework plays the rollout, with the endpoint as its model.

    open a session -> agent(task, base_url, session) -> the agent's reward, or one computed on the last answer
                          |  ^
                          v  | chat completions, responses, messages: captured, exactly as sampled
                        endpoint -> policies

The agent is a function by import path, in this process, or a command. An agent that fails, sends no request or takes too
long makes the rollout a failure. After an infrastructure failure the rollout is played again, also when the agent returned a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
from pydantic import Field, model_validator

from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.importing import check_call, extras_of, load_object
from services.common.records import Task
from services.common.security.keys import without_keys
from services.common.system.child import bound_to_this_process
from services.common.system.processes import end_group, exited, process_group
from services.common.system.threads import DaemonThreads
from services.inference.workflows.agents import (
    CapturedSession,
    SessionSettings,
    captured_outcome,
    check_endpoint,
    conversation_grader,
    in_session,
)
from services.inference.workflows.base import Outcome, Reward, WorkflowContext, build_grader

# --- Runs an agent that is a separate program: starts the program, passes the task, waits for the end.


_KEPT_BYTES = 64 * 1024  # of the end of each output
_LINE_BYTES = 16 * 1024
_SHOWN_CHARACTERS = 2000
_LAST_OUTPUT_S = 1.0  # after its end, for programs that write its output, such as tee
_LOOK_S = 0.05  # between two looks at whether it has ended


class AgentFailedError(RuntimeError):
    """The agent failed, not the infrastructure: the rollout is a failure without a retry."""


async def run_command(
    command: Sequence[str], task: Mapping[str, Any], base_url: str, session: str, seeds: Mapping[str, int]
) -> float | None:
    """The reward that the program prints as its last line, ``{"reward": 1.0}``, or None. Raises ``AgentFailedError``.

    The end of the program, and a cancellation, end all its child processes; the kernel ends the program with this process.
    """
    environment = {
        **without_keys(os.environ),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": session,  # the session, for clients that send no other header
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its client adds /v1
        "ANTHROPIC_API_KEY": session,
        "ROLLMILL_SESSION": session,
        **{f"ROLLMILL_{name.upper()}": str(seed) for name, seed in seeds.items()},
    }
    if shutil.which(command[0]) is None:
        raise AgentFailedError(f"the agent {command[0]} cannot be started: there is no such program")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    async with process_group(*bound_to_this_process(command), env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(_tell(process.stdin, orjson.dumps(dict(task)) + b"\n"))
            out = group.create_task(_end_of(process.stdout))
            err = group.create_task(_end_of(process.stderr))
            code = await exited(process, _LOOK_S)
            await asyncio.wait({out, err}, timeout=_LAST_OUTPUT_S)
            await end_group(process)  # servers that it leaves behind would keep the outputs open
    if code:
        said = err.result().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        raise AgentFailedError(f"the agent {command[0]} ended with code {code}: {said or 'no error output'}")
    return _reward_in(out.result())


def _reward_in(output: bytes) -> float | None:
    lines = output.strip().splitlines()
    try:
        last = orjson.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    reward = last.get("reward") if isinstance(last, dict) else None
    return float(reward) if isinstance(reward, (int, float)) else None


async def _tell(pipe: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program may ignore its task
        pipe.write(text)
        await pipe.drain()
        pipe.close()


async def _end_of(pipe: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await pipe.read(_LINE_BYTES):
        kept = (kept + piece)[-_KEPT_BYTES:]
    return kept


_THREADS = DaemonThreads(256)  # for agents that are plain functions, which mostly wait


class ExternalAgentSettings(SessionSettings):
    agent: str | None = None
    """Import path (`package.module:function`) of `async def agent(task, base_url, session, ...) -> float | None`. Parameters
    `seed` (this rollout's) and `episode_seed` (the task group's) are passed if the function has them."""
    command: list[str] = []
    """Instead of `agent`: a program and its arguments. The program reads the task as JSON from stdin, and OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, ROLLMILL_SESSION, ROLLMILL_SEED and ROLLMILL_EPISODE_SEED from its environment; `{"reward": ...}` as its
    last line is its reward."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    reward: str | None = None
    """Reward of the last answer when the agent neither returns nor posts one: a reward of the gateway (`math`, `boxed`), or
    the import path of a function."""
    conversation_reward: str | None = None
    """Instead of `reward`: the import path of `def reward(task, conversations) -> float | list[float]`, which reads all
    conversations of the rollout, and returns one number or one for each of them."""
    timeout_s: float | None = Field(default=None, gt=0)
    """An agent that takes longer has failed; left out, `rollout.timeout_s` alone bounds it."""

    @model_validator(mode="after")
    def _one_agent(self) -> ExternalAgentSettings:
        if self.agent and self.command:
            raise ValueError("set `agent` (module:function) or `command`, not both")
        if self.reward and self.conversation_reward:
            raise ValueError("set `reward` or `conversation_reward`, not both")
        return self


class ExternalAgent:
    Settings: ClassVar[type[ExternalAgentSettings]] = ExternalAgentSettings

    def __init__(self, settings: ExternalAgentSettings) -> None:
        self._settings = settings
        self._agent: Any = load_object(settings.agent) if settings.agent else None
        self._takes = extras_of(self._agent, ("seed", "episode_seed")) if self._agent is not None else ()
        if self._agent is not None:
            given: dict[str, Any] = {
                "base_url": "",
                "session": "",
                **dict.fromkeys(self._takes, 0),
                **settings.arguments,
            }
            wanted = f"async def agent(task, {', '.join(given)})"
            check_call(self._agent, f"workflow.settings.agent: {settings.agent}", wanted, "task", keywords=given)
        self._grade = build_grader(settings.reward) if settings.reward is not None else None
        path = settings.conversation_reward
        self._grade_all = conversation_grader(path) if path is not None else None

    def policies(self) -> tuple[str, ...]:
        return () if self._settings.policy is None else (self._settings.policy,)

    def check(self, recipe: Recipe) -> None:
        """Check that a recipe has an endpoint for its agents; ``ConfigError`` names the remedy."""
        self._check_agent()
        check_endpoint(recipe, "the agents of external_agent")

    def _check_agent(self) -> None:
        if self._agent is None and not self._settings.command:
            raise ConfigError("external_agent has no agent: set workflow.settings.agent or workflow.settings.command")

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        self._check_agent()
        seeds = {"seed": context.seed, "episode_seed": context.episode_seed}
        session, given = await in_session(
            self._settings,
            context,
            lambda base_url, session_id: self._in_time(task.data, base_url, session_id, seeds),
        )
        if session.last is None:
            raise AgentFailedError("the agent ended without an answer of the model: no tokens to train on")
        told = session.reward if given is None else given
        reward = await self._reward(told, task, context, session)
        return captured_outcome(session, reward.value, reward.metrics)

    async def _in_time(self, task: Mapping[str, Any], base_url: str, session: str, seeds: Mapping[str, int]) -> Any:
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                if self._agent is None:
                    return await run_command(self._settings.command, task, base_url, session, seeds)
                wanted = {name: seeds[name] for name in self._takes}
                call = {"base_url": base_url, "session": session, **wanted, **self._settings.arguments}
                # A blocking client must not stop the endpoint that serves its request: a plain function runs in a thread.
                return await _THREADS.call(self._agent, task, **call)
        except TimeoutError:
            if limit.expired():
                raise AgentFailedError(
                    f"the agent took longer than {self._settings.timeout_s:g} s (workflow.settings.timeout_s)"
                ) from None
            raise

    async def _reward(self, given: Any, task: Task, context: WorkflowContext, session: CapturedSession) -> Reward:
        if given is not None:
            reward = float(given)
            if not math.isfinite(reward):
                raise AgentFailedError(f"the agent returned the reward {reward}; must be a finite number")
            return Reward(value=reward)
        if self._grade_all is not None:
            reward, each = await self._grade_all(task, session.conversations())
            if each is not None:
                session.reward_each(each)
            return Reward(value=reward)
        if self._grade is None or session.last is None:
            raise ConfigError(
                "the agent returned no reward, posted none to /v1/rewards, and workflow.settings.reward names none"
            )
        return await self._grade(context.gateway, task, session.last.text)
