"""The detector on a core: reports of peers become facts, stalls begin and end, and a lost order is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson
import pytest
import structlog

from services.common.telemetry.accounts import AccountState, ActivityTime, PeerState
from services.common.telemetry.logs import LogEvent
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.progress import progress
from services.orchestrator.stalls import Hold
from services.orchestrator.watch import Watch, own_activity
from tests.unit.orchestrator.world import World


def report(world: World, name: str = "a", *, running: tuple[str, ...] = (), peers: tuple[PeerState, ...] = ()) -> None:
    slots = AccountState(
        component=f"replica/{name}",
        activities=(ActivityTime(name="waiting for task groups", on="orchestrator", seconds=1),),
    )
    replica = world.core.pool.get(name)
    assert replica is not None
    world.replica_api.report(
        name,
        "1",
        held=replica.held,
        num_tokens=0,
        emission=[],
        running=running,
        accounts=(slots,),
        peers=peers,
    )


def pass_seconds(world: World, watch: Watch, seconds: int, each: Callable[[], None] = lambda: None) -> None:
    for _ in range(seconds):
        world.clock.now += 1.0
        each()
        watch.report_stalls()


async def test_a_silent_replica_is_named_in_log_metrics_and_progress_and_so_is_its_return(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    world.join()
    watch = world.watch()
    with structlog.testing.capture_logs() as logs:
        pass_seconds(world, watch, 20, lambda: report(world))
        assert not world.core.stalls
        pass_seconds(world, watch, 20)
        (stall,) = progress(world.core).stalls
        assert (stall.component, stall.cause) == ("replica/a", "silent")
        pass_seconds(world, watch, 5, lambda: report(world))
    assert not world.core.stalls
    told = [entry for entry in logs if entry["event"].startswith("run.")]
    assert [(entry["event"], entry["component"], entry["cause"]) for entry in told] == [
        ("run.stalled", "replica/a", "silent"),
        (LogEvent.RUN_UNSTALLED, "replica/a", "silent"),
    ]
    rows = (world.run_dir / "metrics" / "orchestrator.jsonl").read_bytes().splitlines()
    assert [row["moment"] for row in map(orjson.loads, rows) if row["kind"] == "stall"] == ["begin", "end"]


async def test_a_replica_whose_lease_ran_out_is_lost_until_it_is_back(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.join()
    await world.watch().tick()
    world.clock.now += 31.0
    await world.watch().tick()
    assert world.core.lost == {"replica/a": world.clock.now}
    world.join(incarnation="2")
    assert not world.core.lost


async def test_no_lease_runs_out_while_the_orchestrator_itself_stood_still(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.join()
    watch = world.watch()
    await watch.tick()
    world.clock.now += 100.0  # SIGSTOP, SIGCONT
    await watch.tick()
    assert world.core.pool.get("a") is not None
    for _ in range(31):
        world.clock.now += 1.0
        await watch.tick()
    assert world.core.pool.get("a") is None


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
async def test_a_jump_of_the_wall_clock_ends_no_lease(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    world = worlds()
    world.join()
    world.trainer_api.join("model0", "t", 1, 0)
    watch, now = world.watch(), time.time
    await watch.tick()
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    world.clock.now += 4.0
    await watch.tick()
    assert world.core.pool.get("a") is not None and world.core.trainers.get("model0") is not None
    assert OrchestratorCore.__init__.__kwdefaults__["clock"] is time.monotonic


async def test_orders_that_the_reports_know_nothing_of_are_named_and_sent_again(worlds: Callable[..., World]) -> None:
    world = worlds()
    replica, orders = await world.begin()
    lost = {order.task_group_id for order in orders}
    assert lost
    watch = world.watch()
    pass_seconds(world, watch, 14, lambda: report(world))
    (stall,) = world.core.stalls
    assert (stall.component, stall.cause.value) == ("replica/a", "order_lost")
    assert {order.task_group_id for order in await world.orders(replica)} == lost
    pass_seconds(world, watch, 5, lambda: report(world, running=tuple(lost)))
    assert not world.core.stalls


async def test_the_orchestrators_own_time_says_whom_the_run_waits_for(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert own_activity(world.core) == ("waiting for a replica", "inference")
    replica = world.join()
    assert own_activity(world.core) == ("waiting for the first version", "trainer/model0")
    await world.publish(0)
    world.train()
    await world.orders(replica)
    assert own_activity(world.core) == ("waiting for room in the quota", "trainer/model0")
    world.core.dispatcher.hold(Hold.DISK, "full")
    assert own_activity(world.core) == ("waiting for free disk", "disk")
    world.core.pause()
    assert own_activity(world.core) == ("paused", "person")


async def test_ranks_report_beside_the_first_and_renew_no_lease(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.trainer_api.join("model0", "1", 2, 0)
    before = world.core.trainers.get("model0")
    assert before is not None
    lease = before.lease_until
    world.clock.now += 5.0
    world.core.trainers.report_rank("model0", 1, (AccountState(component="trainer/model0/rank1"),))
    # Not of this trainer.
    world.core.trainers.report_rank("model0", 7, (AccountState(component="trainer/model0/rank7"),))
    assert before.rank_reports == {1: 1}
    assert before.lease_until == lease
    watch = world.watch()
    watch.report_stalls()
    assert "trainer/model0/rank1" in watch.detector.accounts


@pytest.mark.parametrize("steps", [1, 0])
async def test_a_run_without_training_waits_for_no_trainer(worlds: Callable[..., World], steps: int) -> None:
    world = worlds(run={"steps": steps})
    world.join()
    pass_seconds(world, world.watch(), 70, lambda: report(world))
    assert [stall.component for stall in world.core.stalls] == ["trainer/model0"] * steps
