"""No finite reward within the bounds ends the orchestrator or makes a statistic that is not finite."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from services.common.config.training import BatchConfig, OverlongPenaltyConfig, ResampleConfig
from services.common.records import StopReason
from services.orchestrator.buffer.assembly import assemble
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    RewardRules,
    RewardTransform,
    advantage_groups,
    resample_group,
    shape_group,
    statistics,
)
from services.orchestrator.journal.entries import Estimate, compared, mean_difference, overall, score
from services.orchestrator.tasks.orders import FilterSolved, Greso
from tests.unit.orchestrator.builders import complete_group

MOST = sys.float_info.max
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.lists(FLOATS, min_size=2, max_size=8)
EXTREMES = ([MOST, MOST], [MOST, -MOST], [MOST, -MOST, -MOST], [1.7e308, 0.0], [1.4e154, 0.0], [5e-324, 0.0])


def numbers_of(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


@given(REWARDS)
@example(EXTREMES[0])
@example(EXTREMES[1])
@example(EXTREMES[2])
@example(EXTREMES[3])
def test_statistics_of_a_group_are_finite(rewards: list[float]) -> None:
    mean, deviation = statistics(rewards)
    assert math.isfinite(mean) and math.isfinite(deviation) and deviation >= 0.0
    assert statistics(rewards[:1]) == (rewards[0], 1.0)


@given(REWARDS, st.sampled_from(["attempt", "rollout", "policy"]), st.floats(-1e300, 1e300), st.floats(1e-300, 1e300))
@example(EXTREMES[1], "attempt", -1e300, 1e300)
def test_groups_stay_finite_through_transform_penalty_resampling_and_assembly(
    rewards: list[float], group_by: Any, bias: float, scale: float
) -> None:
    group = complete_group("g", rewards)
    (found,) = advantage_groups(group, {"model0": group_by})
    transformed, _ = RewardRules(transforms={"model0": RewardTransform(bias=bias, scale=scale)}).transformed(found)
    shaped, _ = shape_group(transformed, OverlongPenaltyConfig(max_tokens=4, buffer_tokens=2, factor=1e300))
    made = [found, transformed, shaped]
    if (resampled := resample_group(shaped, ResampleConfig(keep=2), seed=1)) is not None:
        made.append(resampled)
    for each in made:
        assert_finite(each)
    record, _ = assemble("model0", 1, made, 1, {})
    assert all(math.isfinite(value) for value in record.statistics.values())


def assert_finite(group: AdvantageGroup) -> None:
    assert math.isfinite(group.mean) and math.isfinite(group.std)
    assert all(math.isfinite(member.sequence.reward) for member in group.members)


@pytest.mark.parametrize("penalty", [-1.0, -1e300, 1e300, float("nan"), float("inf")])
def test_a_penalty_of_any_size_can_be_drawn_by(penalty: float) -> None:
    group = complete_group("g", [1.0, 0.0, 1.0, 1.0])
    for outcome in group.trajectories:
        outcome.sequences[0].metrics["penalty"] = penalty  # type: ignore[index]
    (found,) = advantage_groups(group)
    kept = resample_group(found, ResampleConfig(keep=2, positives="weighted", negatives="uniform"), seed=3)
    assert kept is not None and kept.size == 2


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_an_experience_sums_up_finite_numbers(groups: list[list[float]]) -> None:
    experience = ExperiencePipeline({"model0": BatchConfig(size=1, dynamic_sampling=False)}, 3, Counter())
    for number, rewards in enumerate(groups):
        made = complete_group(str(number), rewards)
        outcomes, made.outcomes = list(made.outcomes.values()), {}
        experience.issued(made)
        for outcome in outcomes:
            made.resolve(outcome)
            for verdict in experience.resolved(made, outcome):
                assert math.isfinite(verdict.mean) and math.isfinite(verdict.std)
    _, told = experience.take_batch("model0", 1)
    assert all(math.isfinite(value) for value in told.values())


@given(st.lists(st.lists(FLOATS, min_size=2, max_size=2), min_size=2, max_size=6))
@example([[MOST, MOST], [-MOST, -MOST]])
@example([[MOST, -MOST], [0.0, 5e-324]])
@example([[0.0, 0.0], [1e-160, 1e-160]])
def test_an_evaluation_says_finite_numbers(rewards: list[list[float]]) -> None:
    ids = [str(item) for item in range(len(rewards))]
    first = score("d", ids, rewards, [0] * len(ids), 1.0, items="same")
    second = score("d", ids, list(reversed(rewards)), [0] * len(ids), 1.0, items="same")
    (found,) = compared([first], [second])
    assert found.difference is not None
    for estimate in (first.mean_reward, found.difference, *(passed.share for passed in first.pass_at)):
        assert all(math.isfinite(value) for value in numbers_of(estimate))
    assert math.isfinite(overall([first, second]))
    both = mean_difference([list(first.item_rewards), list(second.item_rewards)])
    assert both is not None and all(math.isfinite(value) for value in numbers_of(both))


@given(REWARDS)
def test_curation_takes_any_finite_reward(rewards: list[float]) -> None:
    for curation in (FilterSolved(1), Greso(1)):
        curation.observe(0, rewards)
        curation.advanced()
        assert all(math.isfinite(value) for value in curation.gauges().values())
        curation.accepts(0, 1)


def test_a_thousand_roles_are_told_as_a_few() -> None:
    """Names of roles are words of a workflow: they become names of metrics."""
    experience = ExperiencePipeline({"model0": BatchConfig(size=1, dynamic_sampling=False)}, 3, Counter())
    made = complete_group("g", [0.0, 1.0])
    outcomes, made.outcomes = made.trajectories, {}
    experience.issued(made)
    for outcome in outcomes:
        (only,) = outcome.sequences
        roles = [replace(only, role=f"role{i}", stop_reason=StopReason.STOP) for i in range(1000)]
        many = replace(outcome, sequences=tuple(roles))
        made.resolve(many)
        experience.resolved(made, many)
    _, told = experience.take_batch("model0", 1)
    assert len([name for name in told if name.startswith("rollout_reward/")]) <= 257
    assert told["rollout_reward/other"] == 0.5
