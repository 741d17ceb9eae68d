"""Reads the reward files of a verifier as Harbor does: ``reward.json`` before ``reward.txt``; else there is no reward."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from services.envgateway.envs.base import EpisodeLostError

_MAIN = "reward"  # of several rewards, the one that counts


def reward_of(files: Mapping[str, str | None], task: str) -> tuple[float, dict[str, float]]:
    """The reward, and the other numbers of ``reward.json``. ``files``: name to content in base64, None where there is none.

    Raises:
        EpisodeLostError: no file, an empty one, no finite number, or several without one called ``reward``.
    """
    found = {name: base64.b64decode(content) for name, content in files.items() if content is not None}
    if "reward.json" in found:
        return _from_json(found["reward.json"], task)
    if "reward.txt" not in found:
        raise EpisodeLostError(f"task {task}: test.sh wrote neither /logs/verifier/reward.txt nor reward.json")
    text = found["reward.txt"].decode(errors="replace").strip()
    try:
        return _finite(float(text)), {}
    except ValueError:
        raise EpisodeLostError(f"task {task}: reward.txt holds {text!r:.80}, which is no finite number") from None


def _from_json(content: bytes, task: str) -> tuple[float, dict[str, float]]:
    try:
        rewards = json.loads(content)
        if not isinstance(rewards, dict) or not rewards:
            raise ValueError("it must be an object of numbers")
        numbers = {name: _number(name, value) for name, value in rewards.items()}
    except (ValueError, RecursionError) as error:
        raise EpisodeLostError(f"task {task}: reward.json cannot be read: {error!s:.120}") from None
    if _MAIN not in numbers and len(numbers) > 1:
        raise EpisodeLostError(
            f"task {task}: reward.json has {', '.join(sorted(numbers))!s:.120} and no {_MAIN!r}: which one counts?"
        )
    main = _MAIN if _MAIN in numbers else next(iter(numbers))
    return numbers[main], {f"reward_{name}": value for name, value in numbers.items() if name != main}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r:.40}")
    return _finite(float(value))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value
