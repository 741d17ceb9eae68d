"""The overlong penalty: its formula, the affected rewards, and their values in a recorded batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.config.training import BatchConfig, OverlongPenaltyConfig, ResampleConfig
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    overlong_penalty,
    shape_group,
    statistics,
)
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import advantage_groups, order, sequence, trajectory
from tests.unit.orchestrator.world import World

DAPO = OverlongPenaltyConfig(max_tokens=20480, buffer_tokens=4096)
SHORT = OverlongPenaltyConfig(max_tokens=10, buffer_tokens=4, factor=0.5)


@given(a=st.integers(0, 40), b=st.integers(0, 40), max_tokens=st.integers(1, 30), data=st.data())
def test_a_longer_sequence_never_pays_less_and_nobody_more_than_the_factor(
    a: int, b: int, max_tokens: int, data: st.DataObject
) -> None:
    buffer = data.draw(st.integers(1, max_tokens))
    config = OverlongPenaltyConfig(max_tokens=max_tokens, buffer_tokens=buffer, factor=0.7)
    low, high = sorted((a, b))
    assert 0.0 <= overlong_penalty(low, config) <= overlong_penalty(high, config) <= 0.7


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="buffer_tokens 11 exceeds max_tokens 10"):
        OverlongPenaltyConfig(max_tokens=10, buffer_tokens=11)


def task_group(name: str, *played: tuple[float, int]) -> TaskGroup:
    """A complete group of (reward, tokens that the policy wrote)."""
    made = TaskGroup(order=order(name, len(played)))
    for index, (reward, num_tokens) in enumerate(played):
        made.resolve(trajectory(name, index, sequence(reward, num_tokens=num_tokens), reward=reward))
    return made


def rewards(group: AdvantageGroup) -> list[float]:
    return [member.sequence.reward for member in group.members]


def test_statistics_are_those_of_the_shaped_rewards() -> None:
    (group,) = advantage_groups(task_group("g", (1.0, 6), (1.0, 8), (0.0, 12), (0.0, 3)))
    shaped, penalties = shape_group(group, SHORT)
    assert penalties == [0.0, 0.25, 0.5, 0.0]
    assert rewards(shaped) == [1.0, 0.75, -0.5, 0.0]
    assert (shaped.mean, shaped.std) == statistics(rewards(shaped))


def take_in(config: BatchConfig, *groups: TaskGroup) -> ExperiencePipeline:
    experience = ExperiencePipeline({"model0": config}, 10, Counter())
    for group in groups:
        empty = TaskGroup(order=group.order)
        experience.issued(empty)
        for outcome in group.outcomes.values():
            empty.resolve(outcome)
            experience.resolved(empty, outcome)
    return experience


def test_filters_judge_rewards_as_they_came() -> None:
    """Lengths make no group of equal rewards worth training, and no right answer a wrong one."""
    config = BatchConfig(size=2, overlong_penalty=SHORT, resample=ResampleConfig(keep=2))
    equal = task_group("equal", (1.0, 4), (1.0, 12), (1.0, 4))
    mixed = task_group("mixed", (1.0, 12), (0.0, 12), (0.0, 4))
    experience = take_in(config, equal, mixed)
    groups, found = experience.take_batch("model0", 1)
    assert [rewards(group) for group in groups] == [[0.5, -0.5]]
    assert (found["groups_equal_dropped"], found["overlong_share"], found["overlong_penalty_mean"]) == (1.0, 1.0, 0.5)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    penalty = {"max_tokens": 4, "buffer_tokens": 4, "factor": 0.5}
    made = World(tmp_path, overlong_penalty=penalty, minibatches=2)
    yield made
    await made.close()


async def test_a_recorded_batch_has_the_shaped_rewards_after_a_restart(world: World) -> None:
    for issued in (await world.begin())[1]:
        await world.send(
            *(
                trajectory(issued.task_group_id, i, sequence(float(i % 2), num_tokens=1 + i), reward=float(i % 2))
                for i in issued.indices
            )
        )
    batch = await world.pull(1)
    trained = {s.sequence_id: s.sequence.reward for s in batch.share(0, 1).sequences}
    assert sorted(trained.values()) == sorted([-0.125, 0.75, -0.375, 0.5] * 2)
    assert batch.record.statistics["batch_reward_mean"] == pytest.approx(0.1875)
    assert batch.record.statistics["rollout_reward_mean"] == pytest.approx(0.5), "what was played is told as it was"
    await world.crash()
    again = await world.pull(1)
    assert again.record == batch.record
    assert {s.sequence_id: s.sequence.reward for s in again.share(0, 1).sequences} == trained
