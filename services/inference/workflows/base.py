"""Protocols and types for workflows: policies, gateway, context, outcome.

A workflow is one asynchronous method: given a task, the policies it may call and the environment gateway, it plays
one rollout and returns its sequences with their rewards. A workflow uses no gRPC, protobuf or engine, so that a test needs
only a few lines of fakes.

An infrastructure failure is never a reward: let ``InfrastructureError`` pass, and the rollout is played again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from services.common.config.base import Section
from services.common.errors import ConfigError, UnknownPolicyError
from services.common.records.types import Purpose, Sampling, Task
from services.common.records.types import Sequence as TokenSequence
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Chat, Message
from services.inference.engine.base import Generation, Watch


class PolicyClient(Protocol):
    """One policy in one rollout. The implementation names and seeds the requests."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> Chat: ...

    @property
    def context_length(self) -> int: ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None
    ) -> Generation:
        """Sample one continuation that ends at a stop token of the chat, the budget, the context, or when
        ``watch`` returns True. ``seed`` replaces the rollout's own."""
        ...


class ProgramStatus(enum.StrEnum):
    """The end of a program, or the verdict on it for one case. An infrastructure failure is an ``InfrastructureError``, not
    a status."""

    OK = "ok"
    WRONG_ANSWER = "wrong_answer"  # of a case only
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"  # of a case only: an execution shows the compiler's message as a runtime error
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    INVALID_REQUEST = "invalid_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of a sandboxed program."""

    status: ProgramStatus
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    wall_time_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that began."""

    episode_id: str
    observation: str
    admissible_actions: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas
    messages: tuple[Message, ...] = ()  # the observation as turns of user and assistant, where it is a chat

    def opening(self) -> list[Message]:
        """The first messages to the policy: turns of user and assistant that alternate and end with the user's. Other
        orders, which some chat templates refuse, and an observation without turns are one user message."""
        roles = [message["role"] for message in self.messages]
        if roles and roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.observation}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one turn of an episode."""

    observation: str
    reward: float
    done: bool
    admissible_actions: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score. ``unparsed``: no answer could be read from the completion; ``opaque``: the program can forge it."""

    value: float
    unparsed: bool = False
    detail: str = ""
    opaque: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the graded sequence."""
        opaque = {RolloutKey.REWARD_OPAQUE.value: 1.0} if self.opaque else {}
        return {RolloutKey.REWARD_UNPARSED.value: float(self.unparsed), **opaque}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCase:
    """One case: text in and out of a program, or positional arguments (a list) and returned value of a function."""

    given: Any
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The outcome of one case. Outputs are cut to a readable length."""

    verdict: ProgramStatus
    detail: str = ""
    stdout: str = ""
    stderr: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is ProgramStatus.OK


class Gateway(Protocol):
    """The environment gateway. Every call raises ``InfrastructureError`` after an infrastructure failure."""

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution: ...

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode: ...

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        """``turn`` counts up from 1; repeating a turn gives its stored result."""
        ...

    async def close(self, episode_id: str) -> None: ...

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward: ...

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        """One outcome per case, in order. ``entry_point``: "function" or "Class().method"; empty for a program that
        reads stdin and prints."""
        ...


class Endpoint(Protocol):
    """The HTTP endpoint where external agents call the policies of one rollout."""

    @property
    def base_url(self) -> str: ...

    def opened(self, session: Any) -> AbstractContextManager[str]:
        """Serve a ``CapturedSession`` under the id that this context yields; its end cancels the session's requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """The policies, gateway and settings of one rollout."""

    policies: Mapping[str, PolicyClient]
    gateway: Gateway
    sampling: Sampling
    seed: int  # of this slot: for sampling, and for the workflow's own draws
    episode_seed: int  # of the task group: for shared draws, such as an environment's start
    purpose: Purpose = Purpose.TRAIN
    endpoint: Endpoint | None = None  # of this replica, if there is one

    def policy(self, name: str | None = None) -> PolicyClient:
        """The named policy; without a name, the only one."""
        if name is None:
            if len(self.policies) != 1:
                raise ConfigError(
                    f"this run has the policies {sorted(self.policies)}: name one in workflow.settings.policy"
                )
            return next(iter(self.policies.values()))
        if name not in self.policies:
            raise UnknownPolicyError(f"no policy {name!r} here; this replica serves {sorted(self.policies)}")
        return self.policies[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one rollout: its sequences, and the reward that evaluation averages."""

    sequences: tuple[TokenSequence, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Workflow(Protocol):
    """Built once per replica from its ``Settings``; ``run`` is called for many rollouts at once.

    A workflow that uses policies by name lists them in ``def policies(self) -> tuple[str, ...]``, so that a recipe without
    them is refused before the start. A workflow with further requirements has ``def check(self, recipe: Recipe) -> None``,
    which raises ``ConfigError``.
    """

    Settings: ClassVar[type[Section]]

    def __init__(self, settings: Any) -> None: ...

    async def run(self, task: Task, context: WorkflowContext) -> Outcome: ...
