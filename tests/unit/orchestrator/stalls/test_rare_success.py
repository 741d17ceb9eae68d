"""Rollouts that succeed seldom are no stall; rollouts that never succeed are one."""

from __future__ import annotations

import random

import pytest

from services.orchestrator.stalls import PRIOR_GROUPS, RARE_TIMES, Cause, Facts, PolicyFacts, Usual, nothing_is_learnt

GROUP, BATCH = 4, 16


def stalled_looks(success: float, seed: int, num_groups: int = 600, group_s: float = 4.0) -> list[int]:
    """The numbers of groups at which the run counts as stalled; each group takes some seconds."""
    draw, usual = random.Random(seed), Usual()
    kept = filtered = in_a_row = 0
    stalled = []
    for group in range(num_groups):
        rewards = {draw.random() < success for _ in range(GROUP)}
        if len(rewards) > 1:
            kept, in_a_row = kept + GROUP, 0
        else:
            filtered, in_a_row = filtered + GROUP, in_a_row + GROUP
        policy = PolicyFacts(
            policy="model0",
            batch_size=BATCH,
            num_kept=kept,
            num_filtered=filtered,
            num_filtered_in_a_row=in_a_row,
        )
        facts = Facts(now=group * group_s, group_size=GROUP, policies=(policy,))
        if found := list(nothing_is_learnt(facts, usual)):
            assert found[0].cause is Cause.ALL_FILTERED
            stalled.append(group)
    return stalled


@pytest.mark.parametrize("success", [0.02, 0.05, 0.2, 0.5, 0.98])
def test_rare_success_is_no_stall(success: float) -> None:
    runs = [stalled_looks(success, seed) for seed in range(20)]
    assert sum(map(bool, runs)) <= 1, "hardly ever by chance"


@pytest.mark.parametrize("success", [0.0, 1.0])
def test_no_success_at_all_is_a_stall_after_the_first_groups(success: float) -> None:
    assert stalled_looks(success, 0)[0] == pytest.approx(RARE_TIMES * PRIOR_GROUPS, abs=2)


def test_a_run_that_succeeded_often_and_stops_to_is_stalled_soon() -> None:
    usual = Usual()
    found = []
    for second in range(200):
        row = max(0, second - 100) * GROUP
        policy = PolicyFacts(
            policy="model0",
            batch_size=BATCH,
            num_kept=GROUP * min(second, 100),
            num_filtered=row,
            num_filtered_in_a_row=row,
        )
        if list(nothing_is_learnt(Facts(now=second, group_size=GROUP, policies=(policy,)), usual)):
            found.append(second)
    assert 100 < found[0] <= 130
