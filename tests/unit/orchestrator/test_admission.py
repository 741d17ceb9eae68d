"""Admission bounds staleness: a simulation of the whole path from issue to training."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.training import BatchConfig
from services.orchestrator.admission import UNFINISHED_SHARE
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import failure, group, sequence, trajectory


class _Simulation:
    """Replicas that always sample from the newest version, and a trainer that trains as soon as possible."""

    def __init__(
        self,
        batch: int,
        group_size: int,
        max_staleness: int,
        seed: int,
        in_order: bool,
        share_dropped: float,
        late: Literal["keep", "mask", "drop"] = "keep",
    ) -> None:
        config = BatchConfig(size=batch, max_staleness=max_staleness, dynamic_sampling=True, late=late)
        self.counters: Counter[str] = Counter()
        self.experience = ExperiencePipeline({"model0": config}, 10_000, self.counters)
        self.batch, self.group_size, self.max_staleness = batch, group_size, max_staleness
        self.in_order, self.share_dropped = in_order, share_dropped
        self.rng = random.Random(seed)
        self.running: list[tuple[TaskGroup, int]] = []
        self.version = 0
        self.num_issued = 0
        self.ages: list[int] = []
        self.num_trained = 0
        self.experience.advanced("model0", 0)

    def issue(self) -> None:
        account = self.experience.admission.accounts["model0"]
        while self.experience.admission.open(["model0"]):
            assert account.counted < account.quota
            assert account.accepted + account.expected < (1 + UNFINISHED_SHARE) * account.quota
            made = group(f"g{self.num_issued}", self.group_size)
            self.num_issued += 1
            self.experience.issued(made)
            self.running.append((made, self.version))

    def complete_one(self) -> None:
        made, version = self.running.pop(0 if self.in_order else self.rng.randrange(len(self.running)))
        drop = self.rng.random() < self.share_dropped
        for index in range(self.group_size):
            if drop and self.rng.random() < 0.5:
                outcome = failure(made.id, index)
            else:
                outcome = trajectory(made.id, index, reward=0.0 if drop else float(index % 2), version=version)
            made.resolve(outcome)
            self.experience.resolved(made, outcome)

    def train(self) -> None:
        step = self.version + 1
        groups, _ = self.experience.take_batch("model0", step)
        self.ages += [self.version - g.min_version for g in groups if g.min_version is not None]
        self.num_trained += sum(g.size for g in groups)
        self.experience.batch_recorded(groups)
        if not self.in_order:
            for _ in range(self.rng.randrange(3)):  # while the trainer computes
                self.issue()
                if self.running:
                    self.complete_one()
        self.version = step
        self.experience.advanced("model0", step)

    @property
    def num_kept(self) -> int:
        return self.experience.num_kept["model0"]

    def run(self, steps: int) -> None:
        for _ in range(100_000):
            self.issue()
            if self.experience.buffers["model0"].ready:
                self.train()
                if self.version == steps:
                    return
            else:
                assert self.running, "nothing runs and nothing is ready: the run stands still"
                self.complete_one()
        raise AssertionError("too many rollouts for so few steps")


cases = given(
    groups_per_batch=st.integers(1, 6),
    group_size=st.integers(2, 4),
    max_staleness=st.integers(0, 4),
    seed=st.integers(0, 10_000),
)


@pytest.mark.parametrize("late", ["drop", "mask"])
@cases
@settings(max_examples=30, deadline=None)
def test_where_late_tokens_are_not_trained_staleness_is_bounded(
    late: Any, groups_per_batch: int, group_size: int, max_staleness: int, seed: int
) -> None:
    """In any order of ends, filtered and failed rollouts included, no older token is trained."""
    simulation = _Simulation(groups_per_batch * group_size, group_size, max_staleness, seed, False, 0.3, late)
    simulation.run(steps=12)
    assert max(simulation.ages) <= max_staleness


@cases
@settings(max_examples=30, deadline=None)
def test_admission_wastes_nothing_when_rollouts_end_in_order(
    groups_per_batch: int, group_size: int, max_staleness: int, seed: int
) -> None:
    simulation = _Simulation(groups_per_batch * group_size, group_size, max_staleness, seed, True, 0.0)
    simulation.run(steps=12)
    assert simulation.counters["sequences_expired"] == 0
    assert max(simulation.ages) == max_staleness  # the whole bound is used


def test_every_policy_must_have_room() -> None:
    config = BatchConfig(size=4, max_staleness=0)
    experience = ExperiencePipeline({"a": config, "b": config}, num_steps=9, counters=Counter())
    assert experience.admission.open(["a", "b"])
    experience.admission.accounts["b"].accepted = 4
    assert not experience.admission.open(["a", "b"])
    assert experience.admission.open(["a"]), "a group of one policy asks for its own room alone"


def test_admit_any_starts_a_rollout_when_one_has_room_and_drops_what_the_other_cannot_use() -> None:
    config = BatchConfig(size=4, max_staleness=0, dynamic_sampling=False)
    counters: Counter[str] = Counter()
    experience = ExperiencePipeline({"a": config, "b": config}, num_steps=9, counters=counters, admit="any")
    for number in range(2):
        made = group(f"g{number}")
        experience.issued(made)
        for index in range(4):
            outcome = trajectory(made.id, index, sequence(policy="a"), sequence(policy="b", version=number))
            made.resolve(outcome)
            experience.resolved(made, outcome)
        if number == 0:
            experience.take_batch("b", 1)
            experience.advanced("b", 1)  # trained; "a" still holds its first batch
            assert experience.admission.open(["a", "b"])
    assert counters["sequences_surplus"] == 4
    assert experience.admission.accounts["a"].accepted == 4
    assert experience.admission.accounts["b"].accepted == 4


def test_nobody_waits_for_the_room_of_a_policy_whose_trainer_is_gone() -> None:
    config = BatchConfig(size=4, max_staleness=0)
    experience = ExperiencePipeline({"a": config, "b": config}, num_steps=9, counters=Counter())
    experience.admission.accounts["b"].accepted = 4
    assert not experience.admission.open(["a", "b"])
    experience.admission.absent.add("b")
    assert experience.admission.open(["a", "b"])
    assert experience.admission.is_surplus("b", 0)
    assert not experience.admission.is_surplus("a", 0)
    experience.admission.absent.add("a")
    assert not experience.admission.open(["a", "b"]), "nobody would train it"


def _resolve(experience: ExperiencePipeline, made: TaskGroup, index: int, version: int = 0) -> None:
    outcome = trajectory(made.id, index, reward=float(index % 2), version=version)
    made.resolve(outcome)
    experience.resolved(made, outcome)


def test_one_straggler_holds_no_places_of_its_finished_siblings_while_the_trainer_has_no_batch() -> None:
    experience = ExperiencePipeline({"model0": BatchConfig(size=8, max_staleness=1)}, num_steps=9, counters=Counter())
    groups = [group(f"g{number}", 8) for number in range(2)]
    for made in groups:
        experience.issued(made)
    assert not experience.admission.open(["model0"])
    for index in range(7):
        _resolve(experience, groups[0], index)
    account = experience.admission.accounts["model0"]
    assert (account.accepted, account.unfinished, account.counted) == (7, 7, 9)
    assert experience.admission.open(["model0"])
    for index in range(8):
        _resolve(experience, groups[1], index)
    assert account.buffered == 8
    assert not experience.admission.open(["model0"]), "a batch is there: everything counts"
