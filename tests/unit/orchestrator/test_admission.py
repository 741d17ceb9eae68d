"""Admission bounds staleness, and sources share the trained sequences: simulations from issue to training, at any pace, for
any share of dropped groups, and after a restart."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.data import SourceConfig
from services.common.config.training import BatchConfig
from services.common.telemetry.metrics import StepKey, source_key
from services.orchestrator.admission import UNFINISHED_SHARE, Mixture
from services.orchestrator.buffer.assembly import assemble
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.groups import TaskGroup
from services.orchestrator.journal.entries import BatchRecord
from tests.unit.orchestrator.builders import failure, group, order, sequence, trajectory

POLICY = "model0"


def sources(**weights: float) -> dict[str, SourceConfig]:
    return {name: SourceConfig(path="r.jsonl", source=name, weight=weight) for name, weight in weights.items()}


@dataclass
class Source:
    """How long its rollouts take, at most so long where ``jitter``; and the shares of its task groups whose rewards are all
    equal, and of the slots of these that fail."""

    seconds: float
    dropped: float = 0.0
    jitter: bool = False
    failed: float = 0.0


@dataclass
class Ring:
    """A dispatcher and a trainer over a true pipeline, in simulated time; ``slots`` rollouts are played at once, also while
    the trainer computes (``beside``)."""

    config: BatchConfig
    weights: dict[str, float]
    worlds: dict[str, Source]
    steps: int
    group: int = 4
    slots: int = 64
    exhausted_after: int = 50
    seed: int = 5
    beside: bool = False
    experience: ExperiencePipeline = field(init=False)
    counters: Counter[str] = field(default_factory=Counter)
    records: list[BatchRecord] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    issued: list[tuple[str, int]] = field(default_factory=list)  # source and number in its stream
    now: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._playing: list[tuple[float, int, TaskGroup]] = []
        self._numbers: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        self.experience = ExperiencePipeline(
            {POLICY: self.config},
            self.steps,
            self.counters,
            sources=sources(**self.weights) if len(self.weights) > 1 else {},
        )
        for mixture in self.experience.mixtures.values():
            mixture._exhausted_after = self.exhausted_after
        self.experience.advanced(POLICY, 0)
        self._playing = []

    def restart(self) -> None:
        """As after a kill: what was running and buffered is lost here, recorded batches are not."""
        self.begin()
        for record in self.records:
            self.experience.mixtures[POLICY].recover(record.statistics)
        self.experience.advanced(POLICY, len(self.records))

    def _issue(self) -> None:
        account = self.experience.admission.accounts[POLICY]
        while len(self._playing) * self.group < self.slots and self.experience.admission.open((POLICY,)):
            assert account.counted < account.quota
            assert account.accepted + account.expected < (1 + UNFINISHED_SHARE) * account.quota
            source = self.experience.next_source((POLICY,))
            number = self._numbers[source]
            self._numbers[source] += 1
            self.issued.append((source, number))
            named = replace(order(f"g{len(self.issued)}", self.group), source=source)
            made = TaskGroup(order=named, born={POLICY: len(self.records)})
            self.experience.issued(made)
            takes = self.worlds[source].seconds * (self._random.random() if self.worlds[source].jitter else 1.0)
            heapq.heappush(self._playing, (self.now + takes, len(self.issued), made))

    def _end_one(self) -> None:
        self.now, _, made = heapq.heappop(self._playing)
        world = self.worlds[made.order.source]
        equal = self._random.random() < world.dropped
        for index in made.order.indices:
            reward = 0.0 if equal else float(index % 2)
            outcome: Any = trajectory(made.id, index, reward=reward, version=made.born[POLICY])
            if equal and self._random.random() < world.failed:
                outcome = failure(made.id, index)
            made.resolve(outcome)
            self.experience.resolved(made, outcome)

    def train(self, steps: int) -> None:
        while len(self.records) < steps:
            self._issue()
            if self.experience.buffers[POLICY].ready:
                step = len(self.records) + 1
                groups, statistics = self.experience.take_batch(POLICY, step)
                self.ages += [step - 1 - g.min_version for g in groups if g.min_version is not None]
                record, _ = assemble(POLICY, step, groups, 1, statistics)
                self.experience.batch_recorded(groups)
                for _ in range(self._random.randrange(3) if self.beside else 0):
                    self._issue()
                    if self._playing:
                        self._end_one()
                self.records.append(record)
                self.experience.advanced(POLICY, step)
            else:
                assert self._playing, "the run would wait for ever"
                self._end_one()

    def shares(self) -> dict[str, float]:
        """Shares of the trained sequences, by the names of their task groups."""
        source_of = {f"g{number}": source for number, (source, _) in enumerate(self.issued, start=1)}
        found = Counter(source_of[e.sequence_id.partition("/")[0]] for r in self.records for e in r.entries)
        return {source: found[source] / found.total() for source in self.weights}

    def error(self) -> float:
        total = sum(self.weights.values())
        return max(abs(share - self.weights[source] / total) for source, share in self.shares().items())


# --- admission ---------------------------------------------------------------------------------------------------------


def simulated(
    batch: int, group_size: int, max_staleness: int, seed: int, world: Source, late: Any, beside: bool
) -> Ring:
    config = BatchConfig(size=batch, max_staleness=max_staleness, dynamic_sampling=True, late=late)
    ring = Ring(config, {"": 1.0}, {"": world}, steps=10_000, group=group_size, slots=10**9, seed=seed, beside=beside)
    ring.train(12)
    return ring


cases = given(
    groups_per_batch=st.integers(1, 6),
    group_size=st.integers(2, 4),
    max_staleness=st.integers(0, 4),
    seed=st.integers(0, 10_000),
)


@pytest.mark.parametrize(("late", "most"), [("drop", 4), ("mask", 4), ("keep", 0), ("wait", 0)])
@cases
@settings(max_examples=12, deadline=None)
def test_where_late_tokens_are_not_trained_staleness_is_bounded(
    late: Any, most: int, groups_per_batch: int, group_size: int, max_staleness: int, seed: int
) -> None:
    """In any order of ends, filtered and failed rollouts included, no older token is trained; on-policy training never
    trains one, whatever ``late`` says."""
    max_staleness = min(max_staleness, most)
    world = Source(1.0, dropped=0.3, jitter=True, failed=0.5)
    ring = simulated(groups_per_batch * group_size, group_size, max_staleness, seed, world, late, beside=True)
    assert max(ring.ages) <= max_staleness


@cases
@settings(max_examples=15, deadline=None)
def test_admission_wastes_nothing_when_rollouts_end_in_order(
    groups_per_batch: int, group_size: int, max_staleness: int, seed: int
) -> None:
    world = Source(1.0)
    ring = simulated(groups_per_batch * group_size, group_size, max_staleness, seed, world, "keep", beside=False)
    assert ring.counters["sequences_expired"] == 0
    assert max(ring.ages) == max_staleness  # the whole bound is used


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
    experience.admission.accounts["b"].buffered = 4
    assert not experience.admission.open(["a", "b"])
    experience.admission.absent.add("b")
    assert experience.admission.open(["a", "b"])
    assert experience.admission.is_surplus("b")
    assert not experience.admission.is_surplus("a")
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


# --- mixtures ----------------------------------------------------------------------------------------------------------

CONFIG = BatchConfig(size=16, max_staleness=2, dynamic_sampling=True)
SLOW = {"fast": Source(1.0), "slow": Source(10.0)}
DROPPED = {"fast": Source(1.0, dropped=0.1), "slow": Source(1.0, dropped=0.8)}


@pytest.mark.parametrize("worlds", [SLOW, DROPPED, {"fast": Source(1, 0.7), "slow": Source(10, 0.4)}])
@pytest.mark.parametrize("slow", [3.0, 0.3])
def test_shares_hold_when_one_source_is_slower_or_dropped_more_often(worlds: dict[str, Source], slow: float) -> None:
    ring = Ring(CONFIG, {"fast": 1.0, "slow": slow}, worlds, steps=60)
    ring.train(5)
    assert ring.error() <= 4 / 80, "within a task group after each batch"
    ring.train(40)
    assert ring.error() <= 0.01


def test_shares_go_on_after_a_restart() -> None:
    ring = Ring(CONFIG, {"a": 1.0, "b": 2.0, "c": 4.0}, {"a": Source(9), "b": Source(1), "c": Source(3)}, steps=60)
    for step in (3, 4, 21, 60):
        ring.train(step)
        ring.restart()
    assert ring.error() <= 0.01
    assert sum(ring.experience.mixtures[POLICY].trained.values()) == 60 * 16


def test_batches_go_on_without_a_source_that_gives_nothing() -> None:
    worlds = {"good": Source(1.0), "solved": Source(1.0, dropped=1.0)}
    ring = Ring(CONFIG, {"good": 1.0, "solved": 1.0}, worlds, steps=40)
    ring.train(20)
    assert ring.shares()["solved"] == 0.0
    assert ring.experience.mixtures[POLICY].exhausted.keys() == {"solved"}
    recent = Counter(source for source, _ in ring.issued[-40:])
    assert recent["good"] >= 12 and recent["solved"] >= 12, "it is still tried in its turn"
    ring.worlds["solved"].dropped = 0.0
    before = len(ring.records)
    ring.train(40)
    late = Counter[str]()
    for record in ring.records[before:]:
        late.update({s: int(record.statistics[source_key(s, StepKey.NUM_SEQUENCES)]) for s in ring.weights})
    assert late["solved"] / late.total() == pytest.approx(0.5, abs=0.05), "and does not displace the others afterwards"
    assert not ring.experience.mixtures[POLICY].exhausted


def test_a_source_that_may_come_is_waited_for_and_another_is_not() -> None:
    mixture = Mixture({"a": 1.0, "b": 1.0})
    assert mixture.plan(4, {"a": [(2, "a")] * 3}, lambda source: True) == ([], "b")
    assert mixture.plan(4, {"a": [(2, "a")] * 3}, lambda source: False) == (["a", "a"], "")
    assert mixture.plan(4, {"a": [(2, "a")], "b": []}, lambda source: False) == ([], "")
    assert mixture.plan(4, {"a": [(2, "a")], "b": [(2, "b")]}, lambda source: True) == (["a", "b"], "")


@given(
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_the_error_of_shares_is_at_most_that_of_one_group_per_source(weights: list[float], sizes: list[int]) -> None:
    names = [str(number) for number in range(len(weights))]
    mixture = Mixture(dict(zip(names, weights, strict=True)))
    for _ in range(12):
        endless = {name: [(size, (name, size)) for size in sizes] for name in names}
        plan, lacks = mixture.plan(12, endless, lambda source: True)
        assert not lacks
        taken = Counter[str]()
        for name, size in plan:
            taken[name] += size
        mixture.taken(taken)
        total = mixture.trained.total()
        for name in names:
            assert abs(mixture.trained[name] - mixture.shares[name] * total) <= 6 * len(names)
