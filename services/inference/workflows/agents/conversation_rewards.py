"""Rewards of an agent's conversations by a function of the user that reads all of them.

``def reward(task, conversations) -> float | list[float]``. A conversation is ``{"policy", "origin", "parent", "messages"}``;
``parent`` is a position in the list, or None.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.importing import load_object
from services.common.records.types import Task
from services.common.user_code import check_call
from services.inference.workflows.rewards import call_reward, finite_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRewards:
    """``each``: a reward for each conversation, or None where the function returned one number for all."""

    rollout: float
    each: tuple[float, ...] | None = None


ConversationGrader = Callable[[Task, Sequence[Mapping[str, Any]]], Awaitable[ConversationRewards]]


def conversation_grader(reward: str) -> ConversationGrader:
    """The grader of a function's import path. Raises ``ConfigError`` for one that cannot be called so."""
    function = load_object(reward)
    check_call(function, reward, "def reward(task, conversations) -> float | list[float]", "task", "conversations")

    async def grade(task: Task, conversations: Sequence[Mapping[str, Any]]) -> ConversationRewards:
        given = await call_reward(function, reward, task, conversations)
        where = f"task {task.task_id}"
        if not isinstance(given, (list, tuple)):
            return ConversationRewards(rollout=finite_reward(given, reward, where))
        if len(given) != len(conversations):
            raise ValueError(
                f"reward {reward} returned {len(given)} numbers for {len(conversations)} conversations of {where}; return one "
                "number for each, or a single number"
            )
        each = tuple(finite_reward(one, reward, f"conversation {i} of {where}") for i, one in enumerate(given))
        return ConversationRewards(rollout=sum(each) / len(each), each=each)

    return grade
