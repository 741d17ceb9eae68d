"""Interface of environments.

An environment is one class, one instance per episode, named by import path in the recipe
(``envgateway.environments: {name: package.module:Class}``). Its methods may be plain or async:

    class Guess:
        def __init__(self, context: EnvironmentContext) -> None: ...
        def reset(self, task: Mapping[str, Any], seed: int) -> Observation: ...
        def step(self, action: str) -> StepResult: ...
        def close(self) -> None: ...

or a class in the style of gymnasium (``envs/gymnasium/style.py``). A ``World`` holds the state that episodes of one kind
share, such as a catalogue or processes.

``InfrastructureError`` from ``step`` means that the turn did not happen and may be repeated; ``EpisodeLostError``, or
any other exception, ends the episode. None is ever a reward.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from services.common.errors import InfrastructureError

if TYPE_CHECKING:  # an environment is written without importing them
    from services.envgateway.rewards.registry import Rewards
    from services.envgateway.tools.registry import ToolBox


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The first message to the policy."""

    text: str
    admissible_actions: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, OpenAI style
    messages: Sequence[Mapping[str, str]] = ()  # the same text as a chat (role, content), if longer than one turn
    remembered: str = ""  # replaces the last message in a history once there is a newer one; empty: the message stays


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a turn."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    admissible_actions: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # countable facts, such as tool_errors
    status: str = ""  # reason of the end, in AgentBench's words where they exist: see ``EndStatus``
    remembered: str = ""  # replaces the observation in a history once there is a newer one; empty: no change


class EndStatus(enum.StrEnum):
    """AgentBench's words for how an episode ended. Those of its machinery are errors here."""

    COMPLETED = "completed"
    CONTEXT_LIMIT = "agent context limit"
    VALIDATION_FAILED = "agent validation failed"
    INVALID_ACTION = "agent invalid action"
    TURN_LIMIT = "task limit reached"


class EpisodeLostError(InfrastructureError):
    """The episode's state is lost or unusable: no turn can be taken again."""


class ActionFailedError(EpisodeLostError):
    """An engine raised at a command. Its game is lost; the process continues."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """Services that the gateway gives to environments."""

    rewards: Rewards
    tools: ToolBox


class Environment(Protocol):
    """One episode's world."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]: ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]: ...

    def close(self) -> Awaitable[None] | None: ...


EnvironmentFactory = Callable[[EnvironmentContext], Environment]


class World(Protocol):
    """State shared by the episodes of one kind. A world loads data only for its first episode."""

    def build(self) -> Environment: ...

    async def close(self) -> None:
        """Called once, after every episode was closed."""
        ...


@runtime_checkable
class IndexedWorld(World, Protocol):
    """A world that can list its tasks: the values that a row may have under ``index``."""

    async def indices(self) -> Sequence[int | str]: ...
