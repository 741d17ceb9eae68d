"""Builders of records for tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from services.common.records import (
    Purpose,
    RolloutFailure,
    Sampling,
    Segment,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
)
from services.orchestrator.buffer.buffer import AdvantageGroup, RewardRules
from services.orchestrator.groups import GroupBy, TaskGroup


def sequence(
    reward: float = 0.0,
    version: int = 0,
    num_tokens: int = 4,
    policy: str = "model0",
    role: str = "agent",
    attempt: int = 0,
    thread: int = 0,
    stop_reason: StopReason = StopReason.STOP,
) -> TokenSequence:
    return TokenSequence(
        policy=policy,
        role=role,
        attempt=attempt,
        thread=thread,
        reward=reward,
        stop_reason=stop_reason,
        segments=(
            Segment.environment([1, 2]),
            Segment.policy(np.arange(num_tokens), -np.linspace(0.1, 1.0, num_tokens), version),
        ),
    )


def trajectory(
    group: str = "g", index: int = 0, *sequences: TokenSequence, reward: float = 0.0, version: int = 0
) -> Trajectory:
    found = sequences or (sequence(reward, version),)
    return Trajectory(task_group_id=group, index=index, sequences=found, reward=reward)


def failure(group: str = "g", index: int = 0, reason: str = "INFRASTRUCTURE") -> RolloutFailure:
    return RolloutFailure(task_group_id=group, index=index, reason=reason)


def order(
    group: str = "g", size: int = 4, purpose: Purpose = Purpose.TRAIN, required: dict[str, int] | None = None
) -> TaskGroupOrder:
    return TaskGroupOrder(
        task_group_id=group,
        task=Task(task_id="1", data={"question": "q"}),
        indices=tuple(range(size)),
        purpose=purpose,
        sampling=Sampling(),
        required_versions=required or {},
    )


def group(name: str = "g", size: int = 4) -> TaskGroup:
    return TaskGroup(order=order(name, size))


def complete_group(name: str, rewards: list[float], version: int = 0) -> TaskGroup:
    made = group(name, len(rewards))
    for index, reward in enumerate(rewards):
        made.resolve(trajectory(name, index, reward=reward, version=version))
    return made


def advantage_groups(group: TaskGroup, group_by: Mapping[str, GroupBy] = MappingProxyType({})) -> list[AdvantageGroup]:
    """Of a complete task group, with the default rules of rewards."""
    return RewardRules(group_by=group_by).groups(group)
