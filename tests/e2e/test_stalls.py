"""Real processes brought to a standstill: each is named, and everybody's time adds up. More in benchmarks/stalls.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from benchmarks._stall_worlds import Shape, World
from services.common.telemetry.logs import LogEvent

pytestmark = pytest.mark.slow

NAMED_S = 240.0  # 30 s where there is a core for each process


@pytest.fixture
def world() -> Iterator[World]:
    made = World(Shape(name="test", gateway=True))
    try:
        made.start()
        made.wait_until_healthy()
        yield made
    finally:
        made.close()


def named(world: World, expected: tuple[str, str]) -> bool:
    deadline = time.monotonic() + NAMED_S
    while time.monotonic() < deadline:
        progress = world.progress()
        if progress is not None and expected in {(stall.component, stall.cause) for stall in progress.stalls}:
            return True
        time.sleep(0.2)
    return False


def test_a_deadlocked_thread_and_a_stopped_gateway_are_named_and_shares_sum_to_one(world: World) -> None:
    progress = world.progress()
    assert progress is not None
    assert {account.component for account in progress.accounts} >= {"orchestrator", "replica/a", "envgateway"}
    for account in progress.accounts:
        shares = [activity.seconds for activity in account.activities]
        now = sum(activity.num_now for activity in account.activities)
        assert sum(shares) > 0
        assert now == account.num_lanes, "each lane is in exactly one activity"
    world.switch("deadlock", True)
    assert named(world, ("replica/a", "stuck"))
    world.switch("deadlock", False)
    world.wait_until_healthy(seconds=4.0)
    world.send("gateway", signal.SIGSTOP)
    assert named(world, ("envgateway", "silent"))
    events = (world.run_dir / "logs").glob("orchestrator*.jsonl")
    assert any(LogEvent.RUN_UNSTALLED in path.read_text() for path in events)
