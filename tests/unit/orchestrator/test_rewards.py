"""From the scores of workflows to the trained advantages, through the core.

Each test feeds outcomes to a core, pulls the batch that the trainer would get, and computes the trainer's advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.processes import RolloutConfig
from services.common.config.training import BatchConfig
from services.common.errors import RolloutTimeoutError
from services.common.records import RolloutFailure, StopReason, Trajectory
from services.inference.workflows.base import Outcome as WorkflowOutcome
from services.orchestrator.buffer.assembly import Batch
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    RewardRules,
    RewardTransform,
    filled,
    statistics,
    without_masked,
)
from services.orchestrator.groups import Outcome, TaskGroup
from services.trainer.advantages import sequence_advantages
from tests.unit.orchestrator.builders import failure, order, sequence, trajectory
from tests.unit.orchestrator.world import World

Worlds = Callable[..., World]
Made = Callable[[str, int], Outcome]

LENGTH = StopReason.LENGTH


def scored(reward: float) -> Made:
    return lambda group, index: trajectory(group, index, reward=reward)


def truncated(reward: float) -> Made:
    return lambda group, index: trajectory(group, index, sequence(reward, stop_reason=LENGTH), reward=reward)


def timed_out(group: str, index: int) -> Outcome:
    return RolloutFailure(task_group_id=group, index=index, reason=RolloutTimeoutError.reason)


def broken(group: str, index: int) -> Outcome:
    return failure(group, index)


def recorded(outcome: WorkflowOutcome) -> Made:
    """The result of a workflow, as a slot's trajectory."""
    return lambda group, index: trajectory(group, index, *outcome.sequences, reward=outcome.reward)


def threads(reward: float, count: int) -> Made:
    """A rollout of an agent that held so many conversations."""
    return lambda group, index: trajectory(
        group, index, *(sequence(reward, thread=number) for number in range(count)), reward=reward
    )


async def trained(world: World, *slots: Made) -> tuple[dict[str, float], Batch]:
    """The trainer's view of a group with these outcomes: advantages by "slot/position"; and the batch.

    A group of 0 and 1 fills the batch up, and is left out of the result.
    """
    _, orders = await world.begin()
    name = orders[0].task_group_id
    await world.send(*(make(name, index) for index, make in enumerate(slots)))
    for other in orders[1:]:
        await world.play(other)
    batch = await world.pull(1)
    found = [s for s in batch.share(0, 1).sequences if s.sequence_id.startswith(name)]
    advantages = sequence_advantages(found, AlgorithmConfig())
    return {s.sequence_id.partition("/")[2]: float(a) for s, a in zip(found, advantages, strict=True)}, batch


def outstanding(world: World) -> int:
    """Sequences that count against the quota and do not wait in the buffer."""
    experience = world.core.experience
    return experience.admission.accounts["model0"].accepted - experience.buffers["model0"].num_sequences


def expected(rewards: Sequence[float]) -> list[float]:
    """GRPO advantages of a group, computed anew."""
    return [(r - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-5) for r in rewards]


def rules(**rollout: object) -> RewardRules:
    return RewardRules(rollout=RolloutConfig.model_validate(rollout))


def task_group(*slots: Made) -> TaskGroup:
    made = TaskGroup(order=order("g", len(slots)))
    for index, make in enumerate(slots):
        made.resolve(make("g", index))
    return made


def only(groups: list[AdvantageGroup]) -> AdvantageGroup:
    (group,) = groups
    return group


def rewards(group: AdvantageGroup) -> list[float]:
    return [member.sequence.reward for member in group.members]


async def test_bias_and_scale_come_before_the_clip_and_after_a_restart_too(worlds: Worlds) -> None:
    world = worlds(size=5, algorithm={"reward_bias": -0.5, "reward_scale": 10.0, "reward_clip": 8.0})
    found, batch = await trained(world, *map(scored, [0.0, 1.0, 9.0, 1.0]))
    assert list(found.values()) == pytest.approx(expected([-5.0, 5.0, 8.0, 5.0]))
    await world.crash()
    again = await world.pull(1)
    assert again.record == batch.record
    assert [s.sequence.reward for s in again.share(0, 1).sequences] == [e.reward for e in batch.record.entries]


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=8),
    st.floats(-5, 5),
    st.floats(0.1, 10),
    st.one_of(st.none(), st.floats(0.1, 60)),
)
def test_statistics_are_those_of_the_transformed_rewards(
    values: list[float], bias: float, scale: float, clip: float | None
) -> None:
    transform = RewardTransform(bias=bias, scale=scale, clip=clip)
    made = RewardRules(transforms={"model0": transform})
    group, num_clipped = made.transformed(only(made.groups(task_group(*map(scored, values)))))
    assert rewards(group) == [transform(value) for value in values]
    assert (group.mean, group.std) == statistics(rewards(group))
    assert num_clipped == sum(clip is not None and abs((value + bias) * scale) > clip for value in values)


@pytest.mark.parametrize("on_timeout", ["penalise", "mask", "as_scored"])
async def test_an_infrastructure_failure_is_never_a_reward(worlds: Worlds, on_timeout: str) -> None:
    """Only time-outs of the policy's own count; other failures are in no statistics, for every setting."""
    world = worlds(size=4, rollout={"on_timeout": on_timeout})
    found, batch = await trained(world, scored(1.0), scored(1.0), broken, broken)
    assert found == {} and batch.record.statistics["groups_equal_dropped"] == 1
    assert batch.record.statistics["timeouts"] == 0


@pytest.mark.parametrize(
    ("scores", "stated", "reward"),
    [([1.0, 1.0], None, 0.0), ([-3.0, -1.0], None, -3.0), ([-3.0, -1.0], -5.0, -5.0), ([1.0, 1.0], 0.25, 0.25)],
)
def test_a_time_out_never_beats_a_scored_rollout_unless_its_reward_is_stated(
    scores: list[float], stated: float | None, reward: float
) -> None:
    made = rules(timeout_reward=stated)
    group = only(made.groups(task_group(*map(scored, scores), timed_out, broken)))
    assert group.silent == (reward,)
    assert (group.mean, group.std) == statistics([*scores, reward])


def test_a_time_out_is_compared_with_first_attempts_alone() -> None:
    def two_attempts(group: str, index: int) -> Trajectory:
        return trajectory(group, index, sequence(0.0, role="solver"), sequence(1.0, role="solver", attempt=1))

    first, second = rules().groups(task_group(two_attempts, two_attempts, timed_out))
    assert (first.attempt, first.silent, first.num_compared) == (0, (0.0,), 3)
    assert (second.attempt, second.silent, second.num_compared) == (1, (), 2)


async def test_resampling_chooses_among_time_outs_too(worlds: Worlds) -> None:
    """Of four right rollouts and four time-outs, GRPO-RoC keeps two of each kind; two of them have tokens."""
    world = worlds(size=2, rollout={"group_size": 8}, resample={"keep": 4})
    found, batch = await trained(world, *[scored(1.0)] * 4, *[timed_out] * 4)
    assert list(found.values()) == pytest.approx(expected([1.0, 1.0, 0.0, 0.0])[:2])
    assert outstanding(world) == len(batch.record.entries)


async def test_masked_truncations_count_in_the_statistics_and_are_not_trained(worlds: Worlds) -> None:
    """DAPO's overlong filtering: the reward of a truncated completion is compared, its tokens are in no loss."""
    world = worlds(size=6, rollout={"on_truncation": "mask"})
    found, batch = await trained(world, scored(1.0), truncated(0.0), scored(0.0), truncated(1.0))
    assert list(found) == ["0/0", "2/0"]
    assert list(found.values()) == pytest.approx([expected([1.0, 0.0, 0.0, 1.0])[i] for i in (0, 2)])
    assert batch.record.statistics["sequences_truncated_masked"] == 2
    assert sum(m.num_sequences for m in batch.record.minibatches) == len(batch.record.entries)
    assert outstanding(world) == len(batch.record.entries)


async def test_penalised_truncations_have_the_stated_reward(worlds: Worlds) -> None:
    world = worlds(size=5, rollout={"on_truncation": "penalise", "truncation_reward": -1.0})
    found, batch = await trained(world, scored(1.0), truncated(1.0), scored(0.0), truncated(0.0))
    assert list(found.values()) == pytest.approx(expected([1.0, -1.0, 0.0, -1.0]))
    assert batch.record.statistics["rollout_reward_mean"] > batch.record.statistics["trained_reward_mean"]


@pytest.mark.parametrize(("reward", "mean"), [(-1.0, 0.5), (None, 1.0)])
def test_a_penalty_replaces_the_reward_of_one_sequence_before_rollouts_are_averaged(
    reward: float | None, mean: float
) -> None:
    """With ``group_by: rollout`` the score of the sequence that was cut is in no reward."""
    made = task_group(
        lambda group, index: trajectory(group, index, sequence(2.0), sequence(7.0, role="b", stop_reason=LENGTH)),
        scored(1.0),
    )
    found = replace(rules(on_truncation="penalise", truncation_reward=reward), group_by={"model0": "rollout"})
    assert rewards(only(found.groups(made))) == [mean, mean, 1.0]


def test_rewards_that_no_rule_reads_are_refused() -> None:
    with pytest.raises(ValidationError, match="timeout_reward is -1, and on_timeout: as_scored does not read it"):
        RolloutConfig(on_timeout="as_scored", timeout_reward=-1.0)
    with pytest.raises(ValidationError, match="truncation_reward is -1, and on_truncation: mask does not read it"):
        RolloutConfig(on_truncation="mask", truncation_reward=-1.0)


@given(st.lists(st.one_of(st.none(), st.floats(-100, 100)), max_size=12))
def test_what_was_not_scored_never_beats_what_was(scores: list[float | None]) -> None:
    known = [score for score in scores if score is not None]
    for before, after in zip(scores, filled(scores), strict=True):
        assert after == before if before is not None else after <= min([0.0, *known])


# --- the same in evaluation ------------------------------------------------------------------------------------------


async def evaluated(world: World, *slots: Made) -> float:
    """The mean reward of an evaluation with these outcomes of its three tasks."""
    await world.publish(0)
    await world.core.begin_evaluation("start")
    orders = await world.orders(world.join())
    await world.send(*(make(order.task_group_id, 0) for make, order in zip(slots, orders, strict=True)))
    (result,) = world.core.evaluations.results.values()
    assert result.num_trajectories == 3, "the denominator never shrinks"
    return result.mean_reward


@pytest.mark.parametrize("lost", [timed_out, broken], ids=["time-out", "failure"])
async def test_in_evaluation_a_failure_does_not_beat_negative_rewards(worlds: Worlds, lost: Made) -> None:
    """Among -30 and -2 a failed item counts as -30, not as 0; without negative rewards as 0."""
    assert await evaluated(worlds(), scored(-30.0), lost, scored(-2.0)) == pytest.approx((-30 - 30 - 2) / 3)
    assert await evaluated(worlds(), scored(1.0), lost, scored(1.0)) == pytest.approx(2 / 3)


async def test_a_failed_sample_never_passes(worlds: Worlds) -> None:
    """Where a return of -20 passes, a failure that is scored -2 among returns of -2 has not passed."""
    world = worlds(evaluation={"pass_reward": -20.0})
    assert await evaluated(world, scored(-2.0), timed_out, broken) == -2.0
    (result,) = world.core.evaluations.results.values()
    (passed,) = result.datasets[0].pass_at
    k, share = passed.k, passed.share
    assert (k, share.value, result.num_failed) == (1, pytest.approx(1 / 3), 2)


async def test_time_outs_and_truncations_mean_the_same_in_evaluation_as_in_training(worlds: Worlds) -> None:
    rollout = {"timeout_reward": -1.0, "on_truncation": "penalise", "truncation_reward": -0.5}
    assert await evaluated(worlds(rollout=rollout), scored(1.0), truncated(1.0), timed_out) == pytest.approx(-0.5 / 3)
    made = rules(**rollout)
    group = only(made.groups(task_group(scored(1.0), truncated(1.0), timed_out)))
    assert [*rewards(group), *group.silent] == [1.0, -0.5, -1.0]
    assert made.outcome_rewards(make("g", i) for i, make in enumerate([scored(1.0), truncated(1.0), timed_out])) == [
        1.0, -0.5, -1.0,
    ]  # fmt: skip


# --- defect 9: agents with several threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("group_by", ["rollout", "attempt"])
async def test_all_threads_of_a_rollout_have_its_advantage(worlds: Worlds, group_by: str) -> None:
    """Defect 9: three successes with one thread and a failure with six: the failure has -1.5, in each of its threads."""
    world = worlds(size=10, group_by=group_by)
    found, batch = await trained(world, *[threads(1.0, 1)] * 3, threads(0.0, 6))
    assert {name: round(a, 3) for name, a in found.items()} == {
        "0/0": 0.5, "1/0": 0.5, "2/0": 0.5, **{f"3/{position}": -1.5 for position in range(6)},
    }  # fmt: skip
    assert {e.group_size for e in batch.record.entries} == {4}, "rollouts, not sequences"


async def test_a_group_of_rollouts_comes_back_from_the_journal_with_its_statistics(worlds: Worlds) -> None:
    """A group that replay draws after a restart has the statistics and rewards of its first training."""
    world = worlds(size=8, group_by="rollout", replay={"ratio": 0.5, "max_staleness": 3}, run={"steps": 4})
    await trained(world, *[threads(1.0, 1)] * 3, threads(0.0, 6))
    await world.publish(1)
    before = [(g.mean, g.std, g.num_compared, rewards(g)) for g in world.core.experience.replay["model0"].groups]
    await world.crash()
    after = [(g.mean, g.std, g.num_compared, rewards(g)) for g in world.core.experience.replay["model0"].groups]
    assert after == before and (0.75, 0.5, 4, [1.0] * 3 + [0.0] * 6) in after


def test_single_sequences_cannot_be_resampled_where_rollouts_are_compared() -> None:
    with pytest.raises(ValidationError, match="resample keeps single sequences of a group, and group_by is rollout"):
        BatchConfig(size=4, group_by="rollout", resample={"keep": 2})  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=8
    ).filter(lambda slots: not all(lost for _, _, lost, _ in slots)),
    st.sampled_from(["attempt", "rollout", "policy"]),
    st.sampled_from(["penalise", "mask", "as_scored"]),
)
def test_masking_changes_no_statistics_and_rollouts_weigh_alike(slots: list, group_by: str, on_truncation: str) -> None:  # type: ignore[type-arg]
    """Mean and deviation do not depend on the mask; and where rollouts are compared, advantages weighed by rollout add
    up to zero over all that are compared."""

    def make(reward: float, count: int, cut: bool) -> Made:
        stop = LENGTH if cut else StopReason.STOP
        return lambda group, index: trajectory(group, index, *[sequence(reward, stop_reason=stop)] * count)

    made = RewardRules(
        rollout=RolloutConfig.model_validate({"on_truncation": on_truncation}),
        group_by={"model0": group_by},  # type: ignore[dict-item]
    )
    group, _ = made.transformed(
        only(made.groups(task_group(*(timed_out if lost else make(r, n, cut) for r, n, lost, cut in slots))))
    )
    kept = without_masked(group)
    if kept is not None:
        assert (kept.mean, kept.std, kept.num_compared) == (group.mean, group.std, group.num_compared)
        assert (kept.size < group.size) == (
            on_truncation == "mask" and any(not lost and cut for _, _, lost, cut in slots)
        )
    centred: dict[str, list[float]] = {}
    for member in group.members:
        key = member.sequence_id if group_by == "policy" else member.rollout
        centred.setdefault(key, []).append(member.sequence.reward - group.mean)
    silent = [reward - group.mean for reward in group.silent]
    assert len(centred) + len(silent) == group.num_compared
    assert sum(sum(found) / len(found) for found in centred.values()) + sum(silent) == pytest.approx(0.0, abs=1e-9)
