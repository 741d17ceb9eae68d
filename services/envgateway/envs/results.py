"""Checks and converts an environment's return values: right types, finite rewards, text that can be sent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from services.envgateway.envs.base import Observation, StepResult


def checked_observation(returned: Any) -> Observation:
    """Raises ``TypeError`` for a value that is not an ``Observation``."""
    if not isinstance(returned, Observation):
        raise TypeError(f"it returned a {type(returned).__name__}, not an Observation")
    return dataclasses.replace(
        returned,
        text=_text(returned.text),
        admissible_actions=tuple(map(_text, returned.admissible_actions)),
        messages=tuple({key: _text(value) for key, value in one.items()} for one in returned.messages),
        remembered=_text(returned.remembered),
    )


def checked_result(returned: Any) -> StepResult:
    """Raises ``TypeError`` for a value that is not a ``StepResult`` and ``ValueError`` for a reward that is not a
    finite number."""
    if not isinstance(returned, StepResult):
        raise TypeError(f"it returned a {type(returned).__name__}, not a StepResult")
    reward = float(returned.reward)
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}; it must be a finite number")
    return dataclasses.replace(
        returned,
        observation=_text(returned.observation),
        reward=reward,
        done=bool(returned.done),
        admissible_actions=tuple(map(_text, returned.admissible_actions)),
        metrics={_text(name): float(value) for name, value in returned.metrics.items()},
        status=_text(returned.status),
        remembered=_text(returned.remembered),
    )


def _text(text: Any) -> str:
    """Replaces lone surrogates, which no message can carry. Raises ``TypeError`` for a value that is not text."""
    if not isinstance(text, str):
        raise TypeError(f"it returned a {type(text).__name__} where text belongs")
    return str(text) if text.isascii() else text.encode(errors="replace").decode()
