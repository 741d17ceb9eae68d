"""Environments in the style of gymnasium, played in text. Needs no package ``gymnasium``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import ConfigError
from services.envgateway.envs.base import EndStatus, Observation, StepResult

_MOST_DIGITS = 18


class ActionReader:
    """Finds the action of a discrete space in a reply."""

    def __init__(self, first: int, number: int, names: Sequence[str], where: str) -> None:
        """Actions are the numbers from ``first``. Raises ``ConfigError`` where there are not as many names."""
        if names and len(names) != number:
            raise ConfigError(
                f"{where}.actions has {len(names)} names, and the environment has {number} actions: name each"
            )
        self._first, self._number = first, number
        self._names = {name.strip().lower(): first + place for place, name in enumerate(names)}
        if names:
            longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
            self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")
            self.told = f"one of {', '.join(names)}"
        else:
            self._pattern = re.compile(r"\d+")
            self.told = f"a whole number from {first} to {first + number - 1}"

    def __call__(self, reply: str) -> int | None:
        found = self._pattern.findall(reply.lower())
        if not found:
            return None
        if self._names:
            return self._names[found[-1]]
        # Python refuses to read thousands of digits: so many are no action of a space that counts.
        action = int(found[-1]) if len(found[-1]) <= _MOST_DIGITS else -1
        return action if self._first <= action < self._first + self._number else None


def is_gymnasium_style(factory: Any) -> bool:
    """Whether ``reset`` takes ``options``, as gymnasium's does and ours does not."""
    reset = getattr(factory, "reset", None)
    return callable(reset) and "options" in inspect.signature(reset).parameters


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
