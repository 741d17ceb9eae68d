"""What an environment is.

An environment is one class, one instance per episode, named by import path in the recipe
(``envgateway.environments: {name: package.module:Class}``). Its methods may be plain or async:

    class Guess:
        def __init__(self, context: EnvironmentContext) -> None: ...
        def reset(self, task: Mapping[str, Any], seed: int) -> Observation: ...
        def step(self, action: str) -> StepResult: ...
        def close(self) -> None: ...

``InfrastructureError`` from ``step`` means that the turn did not happen and may be repeated. Any other exception ends
the episode. Neither is ever a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.envgateway.envs.tools import ToolBox
from services.envgateway.rewards.registry import Rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees first."""

    text: str
    admissible_actions: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, OpenAI style


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a turn brought."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    admissible_actions: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # countable facts, such as tool_errors


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """What the gateway lends to environments."""

    rewards: Rewards
    tools: ToolBox


class Environment(Protocol):
    """One episode's world."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]: ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]: ...

    def close(self) -> Awaitable[None] | None: ...


EnvironmentFactory = Callable[[EnvironmentContext], Environment]
