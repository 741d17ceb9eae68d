"""GRPO-RoC: quotas, the kept rollouts, and purity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.config.training import BatchConfig, ResampleConfig
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    quotas,
    resample_group,
    resample_on_correct,
)
from services.orchestrator.groups import TaskGroup, split_sequence_id
from tests.unit.orchestrator.builders import advantage_groups, order, sequence, trajectory


@given(negative=st.integers(1, 64), positive=st.integers(1, 64), keep=st.integers(2, 64))
def test_quotas_fill_the_group_and_lose_neither_kind(negative: int, positive: int, keep: int) -> None:
    kept_negative, kept_positive = quotas(negative, positive, keep)
    assert kept_negative + kept_positive == min(keep, negative + positive)
    assert 1 <= kept_negative <= negative and 1 <= kept_positive <= positive


groups = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.floats(0, 2)), min_size=1, max_size=40)


@given(group=groups, keep=st.integers(2, 40), seed=st.integers(0, 5))
def test_what_is_kept_is_a_sorted_part_of_the_group_and_the_same_every_time(
    group: list[tuple[float, float]], keep: int, seed: int
) -> None:
    rewards, penalties = [r for r, _ in group], [p for _, p in group]
    for positives in ("lowest", "weighted"):
        for negatives in ("first", "uniform"):
            kept = resample_on_correct(rewards, penalties, keep, positives=positives, negatives=negatives, seed=seed)
            again = resample_on_correct(rewards, penalties, keep, positives=positives, negatives=negatives, seed=seed)
            assert kept == again == sorted(set(kept))
            assert len(kept) == (0 if len(set(rewards)) == 1 else min(keep, len(group)))


def test_weighted_sampling_prefers_clean_rollouts() -> None:
    rewards, penalties = [1.0, 1.0, 1.0, 0.0], [0.0, 9.0, 9.0, 0.0]
    kept = [resample_on_correct(rewards, penalties, 2, positives="weighted", seed=seed) for seed in range(400)]
    assert sum(0 in positions for positions in kept) > 240, "weight 1 of 1.2"
    assert any(0 not in positions for positions in kept)


def group_of(rewards: list[float], penalties: Sequence[float | None], name: str = "g") -> AdvantageGroup:
    task_group = TaskGroup(order=order(name, len(rewards)))
    for index, (reward, penalty) in enumerate(zip(rewards, penalties, strict=True)):
        made = replace(sequence(reward), metrics={} if penalty is None else {"penalty": penalty})
        task_group.resolve(trajectory(name, index, made, reward=reward))
    [group] = advantage_groups(task_group)
    return group


def test_statistics_are_those_of_what_is_kept() -> None:
    kept = resample_group(group_of([1.0, 1.0, 1.0, 0.0], [0.5, 0.0, 0.7, None]), ResampleConfig(keep=2), seed=1)
    assert kept is not None and [m.sequence_id for m in kept.members] == ["g/1/0", "g/3/0"]
    assert (kept.mean, kept.std) == (0.5, pytest.approx(0.7071068))


def test_what_is_drawn_follows_the_seed_of_the_order_and_not_the_name_of_the_group() -> None:
    """Two runs name their groups with marks of their own; a restarted orchestrator keeps name and seed."""
    config = ResampleConfig(keep=3, positives="weighted", negatives="uniform")

    def kept(name: str, seed: int) -> list[int]:
        found = resample_group(group_of([1.0, 0.0] * 6, [0.1] * 12, name), config, seed)
        assert found is not None
        return [split_sequence_id(member.sequence_id)[1] for member in found.members]

    assert kept("a1b2c3-00000001", 7) == kept("a1b2c3-00000001", 7) == kept("ffffff-00000009", 7)
    assert len({tuple(kept("a1b2c3-00000001", seed)) for seed in range(20)}) > 10


def test_what_became_of_each_advantage_group_is_told_when_its_task_group_is_complete() -> None:
    batch = BatchConfig(size=2, max_staleness=0, resample=ResampleConfig(keep=2), late="drop")
    experience = ExperiencePipeline({"model0": batch}, 10, Counter())
    told = []
    for name, rewards in (("a", [1.0, 0.0, 1.0]), ("b", [1.0] * 3), ("c", [0.0, 1.0, 0.0])):
        if name == "c":
            experience.advanced("model0", 1)  # samples of version 0 are too old now
        task_group = TaskGroup(order=order(name, 3))
        experience.issued(task_group)
        for index, reward in enumerate(rewards):
            outcome = trajectory(name, index, reward=reward)
            task_group.resolve(outcome)
            verdicts = experience.resolved(task_group, outcome)
            assert bool(verdicts) == task_group.complete
        told += verdicts
    assert [(v.policy, v.role, v.attempt) for v in told] == [("model0", "agent", 0)] * 3
    assert [(v.outcome, v.num_sequences, v.num_kept) for v in told] == [
        ("kept", 3, 2),
        ("equal_rewards", 3, 0),
        ("expired", 3, 0),
    ]
    assert (told[0].mean, told[1].mean, told[1].std) == (0.5, 1.0, 0.0)
