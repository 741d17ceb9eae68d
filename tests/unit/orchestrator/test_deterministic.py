"""With ``run.deterministic`` a batch is the same for every order in which rollouts end, and for all dropped ones."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.training import BatchConfig
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import failure, group, sequence, trajectory

STEPS = 4
Batches = list[list[str]]


def _outcomes(number: int, size: int, share_dropped: float) -> list[float | None]:
    """Results of the slots of the n-th group, by its number alone: rewards, None for a failure."""
    rng = random.Random(number)
    if rng.random() < share_dropped:
        return [1.0] * size  # equal rewards: dropped
    return [None if rng.random() < 0.1 else float(index % 2) for index in range(size)]


def _batches(batch: int, size: int, share_dropped: float, most_running: int, order: int) -> Batches:
    """The sequences of each step, with at most so many groups played at once and slots that end in a seeded order."""
    config = BatchConfig(size=batch, max_staleness=0, dynamic_sampling=True)
    experience = ExperiencePipeline({"model0": config}, STEPS, Counter(), deterministic=True)
    experience.advanced("model0", 0)
    rng = random.Random(order)
    issued, taken = 0, []
    running: list[tuple[TaskGroup, int, float | None]] = []  # open slots, with their results
    while len(taken) < STEPS:
        open_groups = {made.id for made, _, _ in running}
        while len(open_groups) < most_running and experience.admission.open(["model0"]):
            made = group(f"m-{issued:08d}", size)
            experience.issued(made)
            found = _outcomes(issued, size, share_dropped)
            running += [(made, index, reward) for index, reward in enumerate(found)]
            open_groups.add(made.id)
            issued += 1
        if experience.buffers["model0"].ready:
            assert not running, "something was played that the batch did not need"
            groups, _ = experience.take_batch("model0", len(taken) + 1)
            taken.append([member.sequence_id for found in groups for member in found.members])
            experience.batch_recorded(groups)
            experience.advanced("model0", len(taken))
            continue
        made, index, reward = running.pop(rng.randrange(len(running)))
        outcome = (
            failure(made.id, index)
            if reward is None
            else trajectory(made.id, index, sequence(reward, len(taken)), reward=reward)
        )
        made.resolve(outcome)
        experience.resolved(made, outcome)
    return taken


@given(
    batch=st.integers(1, 24),
    size=st.integers(2, 6),
    share_dropped=st.sampled_from([0.0, 0.3, 0.8]),
    most_running=st.integers(1, 9),
    order=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_batches_do_not_depend_on_when_rollouts_end_or_how_many_run_at_once(
    batch: int, size: int, share_dropped: float, most_running: int, order: int
) -> None:
    one_by_one = _batches(batch, size, share_dropped, most_running=1, order=0)
    assert _batches(batch, size, share_dropped, most_running, order) == one_by_one


def test_nothing_is_issued_while_a_batch_is_trained() -> None:
    experience = ExperiencePipeline(
        {"model0": BatchConfig(size=2, max_staleness=0, dynamic_sampling=False)}, STEPS, Counter(), deterministic=True
    )
    experience.advanced("model0", 0)
    made = group("m-00000001", 2)
    experience.issued(made)
    assert not experience.admission.open(["model0"]), "the batch needs no second group"
    for index in range(2):
        outcome = trajectory(made.id, index)
        made.resolve(outcome)
        experience.resolved(made, outcome)
    groups, _ = experience.take_batch("model0", 1)
    experience.batch_recorded(groups)
    assert not experience.admission.open(["model0"]), "its rollouts would play the version that is being replaced"
    experience.advanced("model0", 1)
    assert experience.admission.open(["model0"])
    assert not experience.admission.open(["model0"], {"model0": 1}), "nor may a replica that lags play"


@pytest.mark.parametrize("names", [["m-00000002", "m-00000010", "m-00000001"], ["m-100000000", "m-99999999"]])
def test_the_order_of_issue_is_that_of_the_counted_names(names: list[str]) -> None:
    config = BatchConfig(size=2 * len(names), max_staleness=0, dynamic_sampling=False)
    experience = ExperiencePipeline({"model0": config}, STEPS, Counter(), deterministic=True)
    experience.advanced("model0", 0)
    for name in names:
        made = group(name, 2)
        experience.issued(made)
        for index in range(2):
            outcome = trajectory(made.id, index)
            made.resolve(outcome)
            experience.resolved(made, outcome)
    groups, _ = experience.take_batch("model0", 1)
    assert [found.task_group_id for found in groups] == sorted(names, key=lambda name: int(name.rpartition("-")[2]))
