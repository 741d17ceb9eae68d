"""Filters and orders of a list of rollouts, and their SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[^\W_]+")  # as FTS5 cuts words
_MOST_WORDS = 12

ORDERS = {
    "newest": "r.number DESC",
    "oldest": "r.number",
    "reward": "r.reward DESC, r.number DESC",
    "-reward": "r.reward NULLS LAST, r.number",
    "tokens": "r.tokens DESC, r.number DESC",
    "-tokens": "r.tokens, r.number",
}
"""The orders of a list, each one that SQLite reads from an index without a sort. A rollout that failed has no reward and
comes last."""

BY_AGE = {"newest": "DESC", "oldest": "ASC"}
"""Orders by number, with the direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts to list; all that is given must hold."""

    words: str = ""
    task: str = ""
    """A task id, or a pattern with ``*``."""
    task_group: str = ""
    step: int | None = None
    evaluation: str = ""
    """Played for this evaluation, such as ``end`` or ``end/greedy``; ``-`` for training."""
    fate: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    order: str = "newest"
    offset: int = 0


def condition(wanted: Filter) -> tuple[str, list[Any]]:
    """The condition on ``rollouts AS r`` in SQL, and its values. Words are not part of it."""
    parts: list[str] = []
    values: list[Any] = []
    # A + keeps SQLite from the index of a wide range: the newest rows come first, and are soon enough.
    simple: Mapping[str, Any] = {
        "r.task_group = ?": wanted.task_group or None,
        "r.step = ?": wanted.step,
        "r.fate = ?": wanted.fate or None,
        "+r.reward >= ?": wanted.min_reward,
        "+r.reward <= ?": wanted.max_reward,
        "+r.tokens >= ?": wanted.min_tokens,
        "+r.tokens <= ?": wanted.max_tokens,
    }
    for text, value in simple.items():
        if value is not None:
            parts.append(text)
            values.append(value)
    if wanted.evaluation == "-":
        parts.append("r.evaluation = ''")
    elif wanted.evaluation:
        parts.append("(r.evaluation = ? OR substr(r.evaluation, 1, ?) = ?)")
        values += [wanted.evaluation, len(wanted.evaluation) + 1, f"{wanted.evaluation}/"]
    if wanted.task:
        parts.append("r.task IN (SELECT id FROM tasks WHERE name GLOB ?)")
        values.append(_glob(wanted.task))
    return " AND ".join(parts) or "1", values


def _glob(pattern: str) -> str:
    """SQLite's GLOB reads ``*``, ``?`` and ``[``; only ``*`` is meant."""
    return "".join(f"[{sign}]" if sign in "?[" else sign for sign in pattern)


def words_of(text: str) -> list[str]:
    """The words of a search; the first ``_MOST_WORDS`` count.

    >>> words_of('two AND "seven-8')
    ['two', 'AND', 'seven', '8']
    """
    return _WORD.findall(text)[:_MOST_WORDS]
