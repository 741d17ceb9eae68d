"""The stall detector under a synthetic clock: each cause is named with its component within 30 s, and slow work is no
alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.records import Refusal, RefusalReason
from services.common.telemetry.accounts import AccountState, PeerState
from services.orchestrator.ingest import Streak
from services.orchestrator.stalls import ADVICE, Cause, Hold
from tests.unit.orchestrator.stalls.runs import MadeUpRun, account, activity

HEALTHY_S = 120


@pytest.fixture
def run() -> MadeUpRun:
    found = MadeUpRun()
    found.run(HEALTHY_S)
    assert not found.stalls
    return found


def silent_replica(run: MadeUpRun) -> None:
    run.freeze("replica reports", "tokens", "reward", "generations", "records", "acks")


def silent_trainer(run: MadeUpRun) -> None:
    run.freeze("trainer reports", "micro-batches")


def silent_rank(run: MadeUpRun) -> None:
    run.freeze("micro-batches")
    run.edits.append(
        lambda facts: replace(
            facts,
            policies=(replace(facts.policies[0], rank_reports={**facts.policies[0].rank_reports, 1: 7}),),
        )
    )


def lost_replica(run: MadeUpRun) -> None:
    run.set(replicas=(), lost={"replica/a": run.now})


def lost_trainer(run: MadeUpRun) -> None:
    run.set_policy(trainer_joined=False, rank_reports={})
    run.set(lost={"trainer/model0": run.now})


def silent_gateway(run: MadeUpRun) -> None:
    began = run.now
    run.freeze("reward")
    run.edits.append(lambda facts: facts)
    run.set_account(
        lambda: account("replica/a", activity("waiting for reward", "envgateway", age=run.now - began, done=HEALTHY_S))
    )
    run.edits.append(
        lambda facts: type(facts)(
            **{
                **{name: getattr(facts, name) for name in facts.__slots__},
                "peers": {
                    "envgateway": PeerState(component="envgateway", silent_s=run.now - began, detail="no answer")
                },
            }
        )
    )


def silent_publisher(run: MadeUpRun) -> None:
    began = run.now
    run.edits.append(
        lambda facts: type(facts)(
            **{
                **{name: getattr(facts, name) for name in facts.__slots__},
                "peers": {"publisher/model0": PeerState(component="publisher/model0", silent_s=run.now - began)},
            }
        )
    )
    run.set_account(
        lambda: account(
            "replica/a/weights/model0", activity("fetching a version", "publisher/model0", age=run.now - began)
        )
    )


def redis_away(run: MadeUpRun) -> None:
    run.set_peer("envgateway", gauges={"queue_redis_connected": 0.0, "queue_workers": 2.0})


def no_workers(run: MadeUpRun) -> None:
    run.set_peer("envgateway", gauges={"queue_redis_connected": 1.0, "queue_workers": 0.0, "queue_unanswered": 3.0})


def full_disk(run: MadeUpRun) -> None:
    run.set(journal_blocked="0 bytes free")
    began = run.now
    run.freeze("acks", "records")
    run.set_account(
        lambda: account(
            "replica/a/records", activity("waiting for acknowledgements", "orchestrator", age=run.now - began)
        )
    )


def journal_stuck(run: MadeUpRun) -> None:
    began = run.now
    run.edits.append(
        lambda facts: type(facts)(
            **{**{name: getattr(facts, name) for name in facts.__slots__}, "journal_oldest_s": run.now - began}
        )
    )


def frozen_engine(run: MadeUpRun) -> None:
    run.freeze("tokens", "generations")


def stuck_step(run: MadeUpRun) -> None:
    run.freeze("micro-batches")


def rank_elsewhere(run: MadeUpRun) -> None:
    """Rank 1 hangs between two steps, so rank 0 waits for rank 1 in a collective."""
    run.freeze("micro-batches")
    run.edits.append(lambda facts: facts)
    run.set_account(lambda: account("trainer/model0/rank1", activity("checkpointing"), progress=40))


def deadlocked_reward(run: MadeUpRun) -> None:
    run.freeze("tokens")
    name = "running the reward function m:f"
    for done in range(20):
        run.set_account(lambda done=done: account("replica/a", activity(name, done=done), progress=done))  # type: ignore[misc]
        run.tick()
    began = run.now
    run.set_account(lambda: account("replica/a", activity(name, now=4, age=run.now - began, done=19), progress=20))


def gateway_hangs(run: MadeUpRun) -> None:
    began, done = run.now, run.count("reward")
    run.freeze("reward")
    run.set_account(
        lambda: account(
            "replica/a",
            activity("generating", "engine/model0"),
            activity("waiting for reward", "envgateway", age=run.now - began, done=done),
            progress=run.count("tokens", 100),
        )
    )


def sandbox_full(run: MadeUpRun) -> None:
    gateway_hangs(run)
    run.set_peer("envgateway", gauges={"queue_interactive_waiting": 9.0})


def weights_do_not_come(run: MadeUpRun) -> None:
    for done in range(8):
        run.set_account(
            lambda done=done: account(  # type: ignore[misc]
                "replica/a/weights/model0", activity("fetching a version", "publisher/model0", done=done)
            )
        )
        run.tick()
    began = run.now
    run.set_account(
        lambda: account(
            "replica/a/weights/model0",
            activity("fetching a version", "publisher/model0", age=run.now - began, done=7, detail="relay: refused"),
        )
    )


def records_do_not_arrive(run: MadeUpRun) -> None:
    began = run.now
    run.freeze("acks", "records")
    run.set_account(
        lambda: account(
            "replica/a/records",
            activity("waiting for acknowledgements", "orchestrator", age=run.now - began),
            progress=run.count("acks"),
        )
    )


def order_lost(run: MadeUpRun) -> None:
    run.set_replica(unseen_orders=(run.now,))


def announcement_lost(run: MadeUpRun) -> None:
    run.set_replica(untaken={"model0": 3})


def all_filtered(run: MadeUpRun) -> None:
    run.set_policy(num_kept=run.count("kept"), num_filtered_in_a_row=64)


def all_fail(run: MadeUpRun) -> None:
    run.set(failures_in_a_row=300, last_failure="INFRASTRUCTURE: the grader is gone", group_size=8)


def too_many_masked(run: MadeUpRun) -> None:
    run.set(held_back={Hold.MASKED: "30% of the newest 64 rollouts have no reward"}, failures_in_a_row=2, group_size=8)


def all_masked(run: MadeUpRun) -> None:
    """The share is too large before so many have failed in a row that the run is paused for that."""
    run.set(
        held_back={Hold.MASKED: "100% of the newest 64 rollouts have no reward"}, failures_in_a_row=64, group_size=8
    )


def batch_refused(run: MadeUpRun) -> None:
    run.set_policy(refusal="engine and trainer of model0 disagree by 0.3 nats a token")


def all_refused(run: MadeUpRun) -> None:
    began, refusal = run.now, Refusal(reason=RefusalReason.TOKEN_ID, detail="99999")
    run.edits.append(lambda facts: replace(facts, refused={"a": Streak(8, began, facts.now, refusal)}))


def curated_away(run: MadeUpRun) -> None:
    run.set(nothing_to_play=True)


CASES: dict[Callable[[MadeUpRun], None], tuple[str, Cause]] = {
    silent_replica: ("replica/a", Cause.SILENT),
    silent_trainer: ("trainer/model0", Cause.SILENT),
    silent_rank: ("trainer/model0/rank1", Cause.SILENT),
    lost_replica: ("replica/a", Cause.LOST),
    lost_trainer: ("trainer/model0", Cause.LOST),
    silent_gateway: ("envgateway", Cause.SILENT),
    silent_publisher: ("publisher/model0", Cause.SILENT),
    redis_away: ("redis", Cause.UNREACHABLE),
    no_workers: ("envgateway/workers", Cause.NO_WORKERS),
    full_disk: ("disk", Cause.NO_FREE_DISK),
    journal_stuck: ("orchestrator", Cause.JOURNAL_STUCK),
    frozen_engine: ("replica/a/engine/model0", Cause.FROZEN),
    stuck_step: ("trainer/model0", Cause.STUCK),
    rank_elsewhere: ("trainer/model0/rank1", Cause.STUCK),
    deadlocked_reward: ("replica/a", Cause.STUCK),
    gateway_hangs: ("envgateway", Cause.STUCK),
    sandbox_full: ("envgateway", Cause.EXHAUSTED),
    weights_do_not_come: ("replica/a/weights/model0", Cause.WEIGHTS_NOT_ARRIVING),
    records_do_not_arrive: ("replica/a", Cause.NOT_ACKNOWLEDGED),
    order_lost: ("replica/a", Cause.ORDER_LOST),
    announcement_lost: ("replica/a", Cause.ORDER_LOST),
    all_filtered: ("workflow", Cause.ALL_FILTERED),
    all_fail: ("rollouts", Cause.ALL_FAIL),
    too_many_masked: ("rollouts", Cause.MASKED),
    all_masked: ("rollouts", Cause.ALL_FAIL),
    batch_refused: ("trainer/model0", Cause.NUMERICS),
    all_refused: ("replica/a", Cause.RECORDS_REFUSED),
    curated_away: ("dataset", Cause.NOTHING_TO_PLAY),
}


@pytest.mark.parametrize("inject", CASES, ids=lambda inject: inject.__name__)
def test_a_stall_is_named_within_30_s_and_ends_when_it_ends(
    run: MadeUpRun, inject: Callable[[MadeUpRun], None]
) -> None:
    inject(run)
    assert run.named_within(30) == {CASES[inject]}
    assert all(stall.advice == ADVICE[stall.cause] for stall in run.stalls)
    run.run(20)
    assert run.pairs == {CASES[inject]}, "it stays the same while it lasts"
    run.thaw()
    run.run(5)
    assert not run.stalls


def test_a_slow_but_healthy_run_raises_no_alarm() -> None:
    """Every activity takes 20 s, from the start: generations, rewards, micro-batches, batches."""
    run = MadeUpRun()

    def slow() -> int:
        return run.ticks // 20

    run.set_account(
        lambda: account(
            "replica/a",
            activity("generating", "engine/model0", age=run.ticks % 20, done=slow()),
            activity("waiting for reward", "envgateway", age=run.ticks % 20, done=slow()),
            progress=slow() * 100,
        )
    )
    run.set_account(lambda: account("trainer/model0", activity("training", age=run.ticks % 60), progress=slow()))
    for _ in range(900):
        run.tick()
        assert not run.stalls, run.stalls


def test_a_large_version_over_a_slow_link_is_slow_and_one_whose_bytes_stop_is_told(run: MadeUpRun) -> None:
    begun, bytes_seen = run.now, [0]

    def fetching() -> AccountState:
        return account(
            "replica/a/weights/model0",
            activity("fetching a version", "publisher/model0", age=run.now - begun),
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
    run.set_account(lambda: account("trainer/model0", activity("training"), progress=min(run.ticks, 60), cpu_s=cpu[0]))
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
    run.set(lost={"replica/b": run.now})
    assert run.named_within(30) == set()


def test_nobody_is_blamed_in_a_run_that_is_paused_or_over(run: MadeUpRun) -> None:
    for state in ("paused", "ended"):
        silent_replica(run)
        run.set(**{state: True})
        assert run.named_within(60) == set()
        run.thaw()
        run.run(3)


def test_who_never_came_is_named_once_processes_had_time_to_load_models() -> None:
    run = MadeUpRun()
    run.set_policy(trainer_joined=False, rank_reports={})
    run.run(50)
    assert not run.stalls
    assert run.named_within(30) == {("trainer/model0", "absent")}


def test_a_gateway_of_another_node_that_does_not_come_is_named() -> None:
    run = MadeUpRun()
    run.set(held_back={Hold.GATEWAY: "the environment gateway of node 1 has not joined"})
    run.run(50)
    assert not run.stalls
    assert run.named_within(30) == {("envgateway", "absent")}


def test_when_nothing_goes_on_and_no_rule_knows_why_the_end_of_the_waits_is_named(run: MadeUpRun) -> None:
    run.freeze("records", "micro-batches", "tokens", "reward", "generations", "states")
    run.set_account(lambda: account("trainer/model0", activity("waiting for a batch", "orchestrator", age=50.0)))
    run.set_account(lambda: account("replica/a", activity("running the workflow", "my-tool-server", age=9.0)))
    assert run.named_within(30) == {("my-tool-server", "no_progress")}


def test_a_full_quota_that_makes_no_batch_is_named() -> None:
    run = MadeUpRun()
    run.run(HEALTHY_S)
    run.freeze("records")
    run.set_account(lambda: account("trainer/model0", activity("waiting for a batch", "orchestrator", age=50.0)))
    run.set_account(lambda: account("replica/a", activity("waiting for task groups", "orchestrator", age=50.0)))
    run.set_policy(quota_full=True, num_kept=3)
    assert run.named_within(30) == {("orchestrator", "quota_full")}


@pytest.mark.parametrize("doing", ["running the reward function own:score", "running the workflow"])
def test_rollouts_that_wait_for_a_function_are_named_with_it_and_no_full_quota(doing: str) -> None:
    run = MadeUpRun()
    run.run(HEALTHY_S)
    run.freeze("records", "micro-batches", "tokens", "reward", "generations", "states")
    run.set_account(lambda: account("trainer/model0", activity("waiting for a batch", "orchestrator", age=50.0)))
    run.set_account(lambda: account("replica/a", activity(doing, age=50.0)))
    run.set_policy(quota_full=True, num_kept=3)
    assert run.named_within(30) == {("replica/a", "no_progress")}
    [stall] = run.stalls
    assert f"have been {doing} for 5" in stall.detail


def test_a_replica_that_takes_versions_one_after_the_other_has_lost_nothing(run: MadeUpRun) -> None:
    for held in range(60):
        run.set_replica(untaken={"model0": held})  # always one behind
        run.tick()
        assert not run.stalls


def test_one_replica_that_cannot_reach_a_gateway_which_others_reach_is_named_itself(run: MadeUpRun) -> None:
    away = PeerState(component="envgateway", silent_s=20.0, detail="no route")
    run.set_replica(peers=(away,))
    assert run.named_within(30) == {("replica/a", "unreachable")}
