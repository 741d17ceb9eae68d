"""The stall detector under a synthetic clock: each cause is named with its component within 30 s, and slow work is no
alarm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.records import Refusal, RefusalReason
from services.common.telemetry.accounts import AccountState, ActivityName, ActivityTime, PeerState
from services.orchestrator.ingest import Streak
from services.orchestrator.members import Assignment, Held, Mailbox, Replica, Trainer
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.stalls import AccountBook, Cause, Hold, Stall
from services.orchestrator.stalls_rules import PRIOR_GROUPS, RARE_TIMES, StallDetector

HEALTHY_S = 120


def activity(name: str, on: str = "", now: int = 1, age: float = 1.0, done: int = 0, **more: Any) -> ActivityTime:
    return ActivityTime(
        name=name, on=on, num_now=now, longest_now_s=age if now else 0.0, num_done=done, seconds=1.0, **more
    )


def account(component: str, *activities: ActivityTime, progress: int = 0, cpu_s: float = 0.0) -> AccountState:
    return AccountState(component=component, activities=activities, progress=progress, cpu_s=cpu_s)


class MadeUpRun:
    """``tick`` is one look, a second later. Without a change every counter grows and no component stalls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ticks = 0
        self.edits: list[Callable[[], None]] = []
        self.frozen: dict[str, int] = {}  # counters that no longer grow, at which value
        self.core = SimpleNamespace(clock=lambda: self.now)
        self.detector = StallDetector(cast(OrchestratorCore, self.core))

    def count(self, name: str, per_tick: int = 1) -> int:
        return self.frozen.get(name, self.ticks * per_tick)

    def freeze(self, *names: str) -> None:
        self.frozen |= {name: self.count(name) for name in names}

    def thaw(self) -> None:
        self.frozen.clear()
        self.edits.clear()

    def refresh(self) -> None:
        """Make the parts of the core that the rules read, as they are at this tick."""
        slots = account(
            "replica/a",
            activity("generating", "engine/model0", now=4, done=self.count("generations")),
            activity("waiting for reward", "envgateway", done=self.count("reward")),
            progress=self.count("tokens", 100),
        )
        training = account(
            "trainer/model0", activity("training", done=self.count("states")), progress=self.count("micro-batches")
        )
        records = account("replica/a/records", activity(ActivityName.NOTHING_TO_SEND), progress=self.count("acks"))
        weights = account("replica/a/weights/model0", activity(ActivityName.UP_TO_DATE))
        self.replica = Replica(
            replica_id="a", incarnation="1", lease_until=0.0, mailbox=Mailbox(), num_reports=self.count("replica reports"),
            accounts=(slots, records, weights),
        )  # fmt: skip
        self.trainer = Trainer(
            policy="model0", incarnation="1", num_ranks=2, lease_until=0.0, num_reports=self.count("trainer reports"),
            accounts={0: (training,)},
            peers=tuple(PeerState(component=name) for name in ("envgateway", "publisher/model0")),
        )  # fmt: skip
        self.core.__dict__.update(
            control=SimpleNamespace(ended=False, paused=False),
            dispatcher=SimpleNamespace(train=True, holds={}),
            journal=SimpleNamespace(blocked="", waiting_s=0.0),
            pool=[self.replica],
            replica=self.replica,
            trainer=self.trainer,
            lost={},
            trainers={"model0": self.trainer},
            batches={"model0": SimpleNamespace(newest_step=0)},
            ledgers={"model0": SimpleNamespace(newest_number=0)},
            num_steps=9,
            last_step=lambda policy: 9,
            experience=experience(8, self.count("kept")),
            ingest=SimpleNamespace(
                num_durable=self.count("records"), failures_in_a_row=0, last_failure="", streaks={}
            ),
            recipe=SimpleNamespace(rollout=SimpleNamespace(group_size=1)),
            training_orders=SimpleNamespace(nothing_to_play=False),
            account=SimpleNamespace(state=lambda: account("orchestrator")),
        )  # fmt: skip
        for edit in self.edits:
            edit()

    def change(self, **changes: Any) -> None:
        """Change parts of the core, by path; a function is called at each look with the seconds since now."""
        began = self.now

        def edit() -> None:
            for path, value in changes.items():
                *parts, name = path.split("__")
                part = reduce(getattr, parts, self.core)
                setattr(part, name, value(self.now - began) if callable(value) else value)

        self.edits.append(edit)

    def set_account(self, make: Callable[[float], AccountState]) -> None:
        """The account, of the seconds since now."""
        began = self.now

        def edit() -> None:
            made = make(self.now - began)
            if made.component.startswith("replica"):
                self.replica.accounts += (made,)
            else:
                self.trainer.accounts[0] += (made,)

        self.edits.append(edit)

    def set_peer(self, component: str, **changes: Any) -> None:
        began = self.now

        def edit() -> None:
            said = {name: to(self.now - began) if callable(to) else to for name, to in changes.items()}
            others = tuple(peer for peer in self.trainer.peers if peer.component != component)
            self.trainer.peers = (*others, PeerState(component=component, **said))

        self.edits.append(edit)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.ticks += 1
        self.refresh()
        self.detector.look()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def named_within(self, seconds: int = 30) -> set[tuple[str, str]]:
        """The pairs that are told, as soon as there are any."""
        for _ in range(seconds):
            self.tick()
            if self.stalls:
                return self.pairs
        return set()

    @property
    def stalls(self) -> tuple[Stall, ...]:
        return self.detector.stalls

    @property
    def pairs(self) -> set[tuple[str, str]]:
        return {(stall.component, stall.cause.value) for stall in self.stalls}


def experience(batch_size: int, kept: int, filtered: int = 0, in_a_row: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_kept={"model0": kept},
        num_filtered={"model0": filtered},
        num_filtered_in_a_row={"model0": in_a_row},
        buffers={"model0": SimpleNamespace(batch_size=batch_size)},
        admission=SimpleNamespace(accounts={"model0": SimpleNamespace(is_full=False)}),
    )


@pytest.fixture
def run() -> MadeUpRun:
    found = MadeUpRun()
    found.run(HEALTHY_S)
    assert not found.stalls
    return found


def silent_replica(run: MadeUpRun) -> None:
    run.freeze("replica reports", "tokens", "reward", "generations", "records", "acks")


def silent_rank(run: MadeUpRun) -> None:
    run.freeze("micro-batches")
    run.change(trainer__rank_reports={1: 7})


def lost_trainer(run: MadeUpRun) -> None:
    run.change(trainers={"model0": None}, lost={"trainer/model0": run.now})


def silent_gateway(run: MadeUpRun) -> None:
    run.freeze("reward")
    run.set_account(
        lambda age: account("replica/a", activity("waiting for reward", "envgateway", age=age, done=HEALTHY_S))
    )
    run.set_peer("envgateway", silent_s=lambda age: age, detail="no answer")


def silent_publisher(run: MadeUpRun) -> None:
    run.set_peer("publisher/model0", silent_s=lambda age: age)
    run.set_account(
        lambda age: account("replica/a/weights/model0", activity("fetching a version", "publisher/model0", age=age))
    )


def records_wait(run: MadeUpRun) -> None:
    run.freeze("acks", "records")
    acks = run.count("acks")
    run.set_account(
        lambda age: account(
            "replica/a/records", activity("waiting for acknowledgements", "orchestrator", age=age), progress=acks
        )
    )


def full_disk(run: MadeUpRun) -> None:
    run.change(journal__blocked="0 bytes free")
    records_wait(run)


def rank_elsewhere(run: MadeUpRun) -> None:
    """Rank 1 hangs between two steps, so rank 0 waits for rank 1 in a collective."""
    run.freeze("micro-batches")
    run.set_account(lambda age: account("trainer/model0/rank1", activity("checkpointing"), progress=40))


def deadlocked_reward(run: MadeUpRun) -> None:
    run.freeze("tokens")
    name = "running the reward function m:f"
    for done in range(20):
        run.set_account(lambda age, done=done: account("replica/a", activity(name, done=done), progress=done))  # type: ignore[misc]
        run.tick()
    run.set_account(lambda age: account("replica/a", activity(name, now=4, age=age, done=19), progress=20))


def gateway_hangs(run: MadeUpRun) -> None:
    done = run.count("reward")
    run.freeze("reward")
    run.set_account(
        lambda age: account(
            "replica/a",
            activity("generating", "engine/model0"),
            activity("waiting for reward", "envgateway", age=age, done=done),
            progress=run.count("tokens", 100),
        )
    )


def sandbox_full(run: MadeUpRun) -> None:
    gateway_hangs(run)
    run.set_peer("envgateway", gauges={"queue_interactive_waiting": 9.0})


def weights_do_not_come(run: MadeUpRun) -> None:
    def fetching(done: int, age: float) -> AccountState:
        told = activity("fetching a version", "publisher/model0", age=age, done=done, detail="relay: refused")
        return account("replica/a/weights/model0", told)

    for done in range(8):
        run.set_account(lambda age, done=done: fetching(done, 1.0))  # type: ignore[misc]
        run.tick()
    run.set_account(lambda age: fetching(7, age))


def order_lost(run: MadeUpRun) -> None:
    unseen = Assignment(open_slots={0}, since=run.now, pinned={}, issued=True, num_unseen=2)
    run.change(replica__assignments={"g": unseen})


def too_many_masked(run: MadeUpRun) -> None:
    run.change(dispatcher__holds={Hold.MASKED: "30% of the newest 64 rollouts have no reward"})
    run.change(ingest__failures_in_a_row=2, recipe__rollout__group_size=8)


def all_masked(run: MadeUpRun) -> None:
    """The share is too large before so many have failed in a row that the run is paused for that."""
    too_many_masked(run)
    run.change(ingest__failures_in_a_row=64)


def all_refused(run: MadeUpRun) -> None:
    began, refusal = run.now, Refusal(reason=RefusalReason.TOKEN_ID, detail="99999")
    run.change(ingest__streaks=lambda age: {"a": Streak(8, began, began + age, refusal)})


def nothing_goes_on(run: MadeUpRun, doing: str, on: str = "", *, is_full: bool = False) -> None:
    run.freeze("records", "acks", "micro-batches", "tokens", "reward", "generations", "states")
    run.set_account(
        lambda age: account("trainer/model0", activity("waiting for a batch", "orchestrator", age=50 + age))
    )
    run.set_account(lambda age: account("replica/a", activity(doing, on, age=50 + age)))
    run.change(experience__admission__accounts={"model0": SimpleNamespace(is_full=is_full)})


CASES: dict[str, tuple[Callable[[MadeUpRun], Any], tuple[str, Cause]]] = {
    "silent replica": (silent_replica, ("replica/a", Cause.SILENT)),
    "silent trainer": (lambda run: run.freeze("trainer reports", "micro-batches"), ("trainer/model0", Cause.SILENT)),
    "silent rank": (silent_rank, ("trainer/model0/rank1", Cause.SILENT)),
    "lost replica": (lambda run: run.change(pool=[], lost={"replica/a": run.now}), ("replica/a", Cause.LOST)),
    "lost trainer": (lost_trainer, ("trainer/model0", Cause.LOST)),
    "silent gateway": (silent_gateway, ("envgateway", Cause.SILENT)),
    "silent publisher": (silent_publisher, ("publisher/model0", Cause.SILENT)),
    "redis away": (
        lambda run: run.set_peer("envgateway", gauges={"queue_redis_connected": 0.0, "queue_workers": 2.0}),
        ("redis", Cause.UNREACHABLE),
    ),
    "no workers": (
        lambda run: run.set_peer(
            "envgateway", gauges={"queue_redis_connected": 1.0, "queue_workers": 0.0, "queue_unanswered": 3.0}
        ),
        ("envgateway/workers", Cause.NO_WORKERS),
    ),
    "full disk": (full_disk, ("disk", Cause.NO_FREE_DISK)),
    "journal stuck": (
        lambda run: run.change(journal__waiting_s=lambda age: age),
        ("orchestrator", Cause.JOURNAL_STUCK),
    ),
    "frozen engine": (lambda run: run.freeze("tokens", "generations"), ("replica/a/engine/model0", Cause.FROZEN)),
    "stuck step": (lambda run: run.freeze("micro-batches"), ("trainer/model0", Cause.STUCK)),
    "rank elsewhere": (rank_elsewhere, ("trainer/model0/rank1", Cause.STUCK)),
    "deadlocked reward": (deadlocked_reward, ("replica/a", Cause.STUCK)),
    "gateway hangs": (gateway_hangs, ("envgateway", Cause.STUCK)),
    "sandbox full": (sandbox_full, ("envgateway", Cause.EXHAUSTED)),
    "weights do not come": (weights_do_not_come, ("replica/a/weights/model0", Cause.WEIGHTS_NOT_ARRIVING)),
    "records wait": (records_wait, ("replica/a", Cause.NOT_ACKNOWLEDGED)),
    "order lost": (order_lost, ("replica/a", Cause.ORDER_LOST)),
    "announcement lost": (
        lambda run: run.change(replica__announced={"model0": (4, 0.0)}, replica__held={"model0": Held(3, "d3")}),
        ("replica/a", Cause.ORDER_LOST),
    ),
    "all filtered": (
        lambda run: run.change(experience=experience(8, run.count("kept"), in_a_row=64)),
        ("workflow", Cause.ALL_FILTERED),
    ),
    "all fail": (
        lambda run: run.change(ingest__failures_in_a_row=300, recipe__rollout__group_size=8),
        ("rollouts", Cause.ALL_FAIL),
    ),
    "too many masked": (too_many_masked, ("rollouts", Cause.MASKED)),
    "all masked": (all_masked, ("rollouts", Cause.ALL_FAIL)),
    "batch refused": (
        lambda run: run.change(trainer__refusal="engine and trainer of model0 disagree by 0.3 nats a token"),
        ("trainer/model0", Cause.NUMERICS),
    ),
    "all refused": (all_refused, ("replica/a", Cause.RECORDS_REFUSED)),
    "no rule knows why": (
        lambda run: nothing_goes_on(run, "running the workflow", "my-tool-server"),
        ("my-tool-server", Cause.NO_PROGRESS),
    ),
    "full quota": (
        lambda run: nothing_goes_on(run, "waiting for task groups", "orchestrator", is_full=True),
        ("orchestrator", Cause.QUOTA_FULL),
    ),
    "waits for a function": (
        lambda run: nothing_goes_on(run, "running the reward function own:score", is_full=True),
        ("replica/a", Cause.NO_PROGRESS),
    ),
    "gateway that others reach": (
        lambda run: run.change(replica__peers=(PeerState(component="envgateway", silent_s=20.0, detail="no route"),)),
        ("replica/a", Cause.UNREACHABLE),
    ),
    "curated away": (
        lambda run: run.change(training_orders__nothing_to_play=True),
        ("dataset", Cause.NOTHING_TO_PLAY),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stall_is_named_within_30_s_and_ends_when_it_ends(run: MadeUpRun, case: str) -> None:
    inject, expected = CASES[case]
    inject(run)
    assert run.named_within(30) == {expected}
    assert all(stall.cause.advice for stall in run.stalls)
    run.run(20)
    assert run.pairs == {expected}, "it stays the same while it lasts"
    run.thaw()
    run.run(5)
    assert not run.stalls


def test_a_slow_but_healthy_run_raises_no_alarm() -> None:
    """Every activity takes 20 s, from the start: generations, rewards, micro-batches, batches."""
    run = MadeUpRun()

    def slow() -> int:
        return run.ticks // 20

    run.set_account(
        lambda age: account(
            "replica/a",
            activity("generating", "engine/model0", age=run.ticks % 20, done=slow()),
            activity("waiting for reward", "envgateway", age=run.ticks % 20, done=slow()),
            progress=slow() * 100,
        )
    )
    run.set_account(lambda age: account("trainer/model0", activity("training", age=run.ticks % 60), progress=slow()))
    for _ in range(900):
        run.tick()
        assert not run.stalls, run.stalls


def test_a_large_version_over_a_slow_link_is_slow_and_one_whose_bytes_stop_is_told(run: MadeUpRun) -> None:
    bytes_seen = [0]

    def fetching(age: float) -> AccountState:
        return account(
            "replica/a/weights/model0",
            activity("fetching a version", "publisher/model0", age=age),
            progress=bytes_seen[0],
        )

    run.set_account(fetching)
    for _ in range(300):
        bytes_seen[0] += 1
        run.tick()
    assert not run.stalls
    assert run.named_within(30) == {("replica/a/weights/model0", "weights_not_arriving")}


def test_a_long_micro_batch_that_computes_is_slow_and_one_that_does_not_is_stuck() -> None:
    run = MadeUpRun()
    cpu = [0.0]
    run.set_account(
        lambda age: account("trainer/model0", activity("training"), progress=min(run.ticks, 60), cpu_s=cpu[0])
    )
    for _ in range(60 + 40):
        cpu[0] += 0.9
        run.tick()
    assert not run.stalls
    assert run.named_within(30) == {("trainer/model0", "stuck")}


def test_what_was_learnt_fades_and_a_stall_teaches_nothing() -> None:
    run = MadeUpRun()
    run.run(HEALTHY_S)
    for _ in range(3):  # the same stall again and again: each is named as fast as the first
        run.freeze("tokens")
        before = run.now
        assert run.named_within(30) == {("replica/a/engine/model0", "frozen")}
        assert run.now - before < 15
        run.run(30)
        run.thaw()
        run.run(20)


def test_a_process_that_stood_still_is_told_afterwards_and_nobody_else_is_blamed(run: MadeUpRun) -> None:
    run.tick(45.0)
    run.tick()
    run.tick()
    assert run.pairs == {("orchestrator", "stood_still")}
    run.run(15)
    assert not run.stalls


def test_a_lost_replica_is_no_stall_while_another_plays(run: MadeUpRun) -> None:
    run.change(lost={"replica/b": run.now})
    assert run.named_within(30) == set()


def test_nobody_is_blamed_in_a_run_that_is_paused_or_over(run: MadeUpRun) -> None:
    for state in ("paused", "ended"):
        silent_replica(run)
        run.change(**{f"control__{state}": True})
        assert run.named_within(60) == set()
        run.thaw()
        run.run(3)


@pytest.mark.parametrize(
    ("missing", "component"),
    [
        (lambda run: run.change(trainers={"model0": None}), "trainer/model0"),
        (
            lambda run: run.change(dispatcher__holds={Hold.GATEWAY: "the gateway of node 1 has not joined"}),
            "envgateway",
        ),
    ],
)
def test_who_never_came_is_named_once_processes_had_time_to_load_models(
    missing: Callable[[MadeUpRun], None], component: str
) -> None:
    run = MadeUpRun()
    missing(run)
    run.run(50)
    assert not run.stalls
    assert run.named_within(30) == {(component, "absent")}


def test_a_replica_that_takes_versions_one_after_the_other_has_lost_nothing(run: MadeUpRun) -> None:
    for held in range(60):
        held_now = {"model0": Held(held, "")}  # always one behind
        run.change(replica__announced={"model0": (held + 1, 0.0)}, replica__held=held_now)
        run.tick()
        assert not run.stalls


# --- rollouts that succeed seldom

GROUP, BATCH = 4, 16


def is_stalled(detector: StallDetector, now: float, kept: int, filtered: int, in_a_row: int) -> bool:
    core: Any = detector._core
    detector.now, core.experience = now, experience(BATCH, kept, filtered, in_a_row)
    causes = [stall.cause for stall in detector.nothing_is_learnt()]
    assert causes in ([], [Cause.ALL_FILTERED])
    return bool(causes)


def detector_of_rare_success() -> StallDetector:
    run = MadeUpRun()
    run.change(recipe__rollout__group_size=GROUP)
    run.refresh()
    return run.detector


def stalled_looks(success: float, seed: int, num_groups: int = 600, group_s: float = 4.0) -> list[int]:
    """The numbers of groups at which the run counts as stalled; each group takes some seconds."""
    draw, detector = random.Random(seed), detector_of_rare_success()
    kept = filtered = in_a_row = 0
    stalled = []
    for group in range(num_groups):
        rewards = {draw.random() < success for _ in range(GROUP)}
        if len(rewards) > 1:
            kept, in_a_row = kept + GROUP, 0
        else:
            filtered, in_a_row = filtered + GROUP, in_a_row + GROUP
        if is_stalled(detector, group * group_s, kept, filtered, in_a_row):
            stalled.append(group)
    return stalled


@pytest.mark.parametrize("success", [0.02, 0.2, 0.98])
def test_rare_success_is_no_stall(success: float) -> None:
    runs = [stalled_looks(success, seed) for seed in range(12)]
    assert sum(map(bool, runs)) <= 1, "hardly ever by chance"


@pytest.mark.parametrize("success", [0.0, 1.0])
def test_no_success_at_all_is_a_stall_after_the_first_groups(success: float) -> None:
    assert stalled_looks(success, 0)[0] == pytest.approx(RARE_TIMES * PRIOR_GROUPS, abs=2)


def test_a_run_that_succeeded_often_and_stops_to_is_stalled_soon() -> None:
    detector, found = detector_of_rare_success(), []
    for second in range(200):
        row = max(0, second - 100) * GROUP
        if is_stalled(detector, second, GROUP * min(second, 100), row, row):
            found.append(second)
    assert 100 < found[0] <= 130


# --- the account book


def trained(training_s: float, waiting_s: float) -> AccountState:
    return AccountState(
        component="trainer/model0",
        activities=(
            ActivityTime(name="training", seconds=training_s),
            ActivityTime(name="waiting for a batch", on="orchestrator", seconds=waiting_s),
        ),
    )


def test_a_component_that_was_started_again_keeps_what_its_earlier_life_booked() -> None:
    book = AccountBook()
    book.note([trained(2.0, 6.0)])
    book.note([trained(3.0, 7.0)])
    book.note([trained(0.5, 0.5)])  # a new process
    book.note([trained(1.0, 1.0)])
    assert book.summary() == {"trainer/model0": {"waiting for a batch -> orchestrator": 0.6667, "training": 0.3333}}
    assert book.waits() == {"trainer/model0": {"": 0.3333, "orchestrator": 0.6667}}


def test_the_share_of_the_present_forgets_what_is_long_over() -> None:
    book, waiting, share = AccountBook(), 0.0, None
    assert book.idle_shares(-1.0) == (None, None)
    for second in range(200):
        waiting += 0.0 if second < 100 else 1.0
        book.note([trained(second + 1 - waiting, waiting)])
        share, of_replicas = book.idle_shares(float(second))
    assert share == pytest.approx(1.0) and of_replicas is None
