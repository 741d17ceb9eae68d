"""Environments in the style of gymnasium, played in text. Needs no package ``gymnasium``.

    class Maze:
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]: ...
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]: ...

- The task's row arrives as ``options``.
- Observations that are no text are shown as Python writes them.
- ``info["admissible_actions"]``, where there is one, is offered to the policy.
- The action is the policy's text; where ``action_space`` counts its actions (has ``n``), the last whole number of the
  text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from services.envgateway.envs.base import EndStatus, Environment, EnvironmentContext, Observation, StepResult
from services.envgateway.envs.gymnasium.world import ActionReader


def is_gymnasium_style(factory: Any) -> bool:
    """Whether ``reset`` takes ``options``, as gymnasium's does and ours does not."""
    reset = getattr(factory, "reset", None)
    return callable(reset) and "options" in inspect.signature(reset).parameters


class GymnasiumFactory:
    """Builds one environment per episode from a class, or a function, that needs no arguments."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self, context: EnvironmentContext) -> Environment:
        return GymnasiumEnvironment(self._make())


class GymnasiumEnvironment:
    """One episode. Its methods are plain: the gateway runs them in a thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        observation, info = self._inner.reset(seed=seed % 2**31, options=dict(task))
        return Observation(text=_text(observation), admissible_actions=_admissible(info))

    def step(self, action: str) -> StepResult:
        chosen: Any = action
        num_actions = getattr(getattr(self._inner, "action_space", None), "n", None)
        if num_actions is not None:
            read = ActionReader(0, num_actions, (), "")
            chosen = read(action)
            if chosen is None:
                return StepResult(observation=f"The action must be {read.told}.", metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, info = self._inner.step(chosen)
        done = bool(terminated or truncated)
        status = ""
        if done:
            status = EndStatus.COMPLETED if terminated else EndStatus.TURN_LIMIT
        return StepResult(
            observation=_text(observation),
            reward=float(reward),
            done=done,
            admissible_actions=_admissible(info),
            status=status,
        )

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else str(observation)


def _admissible(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(action) for action in info.get("admissible_actions", ()))
