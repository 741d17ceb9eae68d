"""Environments in the place of a user's, for the benchmark ``worlds_hostile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.envgateway.envs.base import EnvironmentContext, Observation, StepResult


class _Four:
    n = 4


class Maze:
    """In gymnasium's style, with counted actions, without rewards."""

    action_space = _Four()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "start", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not 0 <= action < _Four.n:
            raise ValueError(f"no action {action}")
        return f"went {action}", 0.0, False, False, {}


class Careless:
    """Fails at every action, in one of the ways that a class has: each must lose its own episode only."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._returns: tuple[Any, ...] = (None, ("", 1.0), StepResult(reward=float("nan")), StepResult(observation=5))  # type: ignore[arg-type]

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation(text="go")

    def step(self, action: str) -> StepResult:
        way = len(action) % 8
        if way < 4:
            returned: StepResult = self._returns[way]
            return returned
        raise (SystemExit, ValueError, KeyboardInterrupt, RecursionError)[way - 4](f"cannot read {action}")

    def close(self) -> None:
        pass
