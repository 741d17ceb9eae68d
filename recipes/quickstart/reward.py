"""The quickstart's reward: one boxed integer, equal to the truth. Any function of (task, completion) will do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"\s*\\boxed\{(-?\d+)\}\s*")


def boxed_answer(task: Mapping[str, Any], completion: str) -> float:
    r"""1 when the last turn is a well-formed ``\boxed{integer}`` and the integer is right, else 0.

    >>> boxed_answer({"answer": "1786"}, r"\boxed{1786}")
    1.0
    """
    match = _ANSWER.fullmatch(completion)
    return float(match is not None and match.group(1) == task["answer"])
