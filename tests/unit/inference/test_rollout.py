"""Playing task groups: repeated orders, retries, failures, time limits, cancellation, versions."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from services.common.config.base import Section
from services.common.errors import (
    CapacityError,
    EpisodeNotFoundError,
    InfrastructureError,
    PromptTooLongError,
    RolloutTimeoutError,
    WeightsStaleError,
)
from services.common.records import PlayedBy, Purpose, Task
from services.inference.engine.base import WeightUpdate
from services.inference.rollouts import RolloutPlayer, ServedPolicy
from services.inference.workflows.base import Outcome, Reward, Workflow, WorkflowContext
from services.inference.workflows.single import SingleTurn, SingleTurnSettings
from tests.unit.inference.fakes import FakeGateway, RecordingEngine, Records, make_order, played, served_policy

Behaviour = Callable[[WorkflowContext], Any]


class Told:
    """A workflow that runs the test's hook, then plays a single turn."""

    Settings: ClassVar[type[Section]] = SingleTurnSettings

    def __init__(self, settings: SingleTurnSettings, before: Behaviour | None = None) -> None:
        self._turn = SingleTurn(settings)
        self._before = before
        self.num_runs = 0

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        self.num_runs += 1
        if self._before is not None:
            await self._before(context)
        return await self._turn.run(task, context)


async def make_player(
    before: Behaviour | None = None,
    *,
    num_slots: int = 8,
    kind: type[Told] = Told,
    gateway: FakeGateway | None = None,
    **engine: Any,
) -> tuple[RolloutPlayer, Records, Told, ServedPolicy]:
    policy = await served_policy(["hello"], **engine)
    records, workflow = Records(), kind(SingleTurnSettings(), before)
    as_workflow: Workflow = workflow
    player = RolloutPlayer(
        workflows=dict.fromkeys(Purpose, as_workflow),
        policies={"model0": policy},
        gateway=gateway or FakeGateway(),
        sink=records,
        replica_id="a",
        num_slots=num_slots,
        infra_retries=2,
    )
    return player, records, workflow, policy


def raises(error: BaseException, times: int = 1_000_000) -> Behaviour:
    left = [times]

    async def before(context: WorkflowContext) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error

    return before


async def forever(context: WorkflowContext) -> None:
    await asyncio.sleep(3600)


@pytest.fixture(autouse=True)
def _no_pauses_between_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.inference.rollouts._RETRY_BASE_S", 0.001)


async def test_every_slot_of_an_order_becomes_a_trajectory() -> None:
    player, records, _, _ = await make_player()
    assert player.play(make_order(indices=(0, 2, 5))) == 3
    assert player.num_free_slots == 5
    await player.wait_until_idle()
    assert sorted(t.index for t in records.trajectories) == [0, 2, 5]
    assert all(t.task_group_id == "g0" and t.replica_id == "a" for t in records.trajectories)
    assert all(0 < t.started_at <= t.finished_at for t in records.trajectories)
    assert player.num_free_slots == 8
    assert player.running_task_group_ids == ()


@pytest.mark.parametrize("purpose", Purpose)
async def test_only_what_is_trained_records_which_tokens_could_be_drawn(purpose: Purpose) -> None:
    player, _, _, policy = await make_player()
    await played(player, make_order(purpose=purpose))
    engine = policy.engine
    assert isinstance(engine, RecordingEngine)
    assert {request.record_kept for request in engine.requests} == {purpose is Purpose.TRAIN}


async def test_a_repeated_order_plays_no_slot_twice() -> None:
    player, records, workflow, _ = await make_player()
    player.play(make_order(indices=(0, 1)))
    assert player.play(make_order(indices=(0, 1, 2))) == 1
    await player.wait_until_idle()
    assert player.play(make_order(indices=(0, 1, 2))) == 0
    assert workflow.num_runs == len(records.all) == 3
    assert player.counters.repeated == 5


@pytest.mark.parametrize(
    "error", [InfrastructureError("down"), EpisodeNotFoundError("gone"), CapacityError("full")], ids=lambda e: e.reason
)
async def test_an_infrastructure_failure_is_played_again(error: Exception) -> None:
    player, records, workflow, _ = await make_player(raises(error, times=2))
    await played(player, make_order(indices=(0,)))
    assert len(records.trajectories) == 1
    assert workflow.num_runs == 3
    assert player.counters.retries == 2


class MuteError(Exception):
    """Its own code raises."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "reason", "attempts"),
    [
        (InfrastructureError("down"), "INFRASTRUCTURE", 3),
        (PromptTooLongError("long"), "PROMPT_TOO_LONG", 1),
        (KeyError("answer"), "KeyError", 1),
        (MuteError(), "MuteError", 1),
    ],
    ids=["infrastructure", "prompt", "key", "mute"],
)
async def test_what_stays_wrong_fails_its_slot_and_no_other_and_is_never_a_reward(
    error: Exception, reason: str, attempts: int
) -> None:
    player, records, workflow, _ = await make_player(raises(error, times=attempts), num_slots=1)
    await played(player, make_order(indices=(0, 1, 2)))
    assert [(failure.index, failure.reason) for failure in records.failures] == [(0, reason)]
    assert [trajectory.index for trajectory in records.trajectories] == [1, 2]
    assert workflow.num_runs == attempts + 2


async def cancels_itself(context: WorkflowContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel("as a cancel scope does")
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (raises(asyncio.CancelledError("a scope")), "CancelledError"),
        (cancels_itself, "CancelledError"),
        (raises(SystemExit(0)), "SystemExit"),
    ],
)
async def test_a_workflow_that_leaves_or_cancels_fails_its_slots_by_name(before: Behaviour, reason: str) -> None:
    player, records, workflow, _ = await make_player(before)
    await played(player, make_order(indices=range(2)))  # type: ignore[arg-type]
    assert [failure.reason for failure in records.failures] == [reason] * 2
    workflow._before = None
    await played(player, make_order(task_group_id="g1", indices=range(2)))  # type: ignore[arg-type]
    assert len(records.trajectories) == 2


async def test_every_rollout_has_a_row_of_its_own() -> None:
    seen: list[object] = []

    class Counting(Told):
        async def run(self, task: Task, context: WorkflowContext) -> Outcome:
            seen.append((task.data.get("count", 0), list(task.data.setdefault("places", []))))  # type: ignore[attr-defined]
            task.data["count"] = 1  # type: ignore[index]
            task.data["places"].append(1)
            return await super().run(task, context)

    player, records, _, _ = await make_player(kind=Counting)
    order = make_order()
    order.task.data["places"] = []  # type: ignore[index]
    await played(player, order)
    assert len(records.trajectories) == 4
    assert seen == [(0, [])] * 4


async def test_a_rollout_beyond_its_time_is_a_failure_that_names_the_wait() -> None:
    player, records, _, _ = await make_player(forever)
    await played(player, make_order(indices=(0,), timeout_s=0.05))
    (failure,) = records.failures
    assert failure.reason == "DEADLINE_EXCEEDED", "its own code may have waited for anything"
    assert "g0/0" in failure.detail
    assert "0.05 s" in failure.detail


class SlowGateway(FakeGateway):
    """Its rewards never come."""

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")


async def played_late(before: Behaviour | None = None, **settings: Any) -> str:
    """Why a rollout that runs out of time has failed. The time is enough to reach the wait on a busy machine."""
    player, records, _, _ = await make_player(before, **settings)
    await played(player, make_order(indices=(0,), timeout_s=0.4))
    (failure,) = records.failures
    return failure.reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"latency_s": 3600.0}, RolloutTimeoutError.reason),
        ({"gateway": SlowGateway()}, "DEADLINE_EXCEEDED"),
        ({"latency_s": 3600.0, "before": raises(InfrastructureError("down"), times=1)}, "DEADLINE_EXCEEDED"),
    ],
    ids=["the policy", "the gateway", "an infrastructure failure"],
)
async def test_a_rollout_has_timed_out_only_where_the_policy_was_slow(settings: dict[str, Any], reason: str) -> None:
    assert await played_late(**settings) == reason


async def test_an_agent_outside_whose_generation_is_running_when_its_time_is_over_has_timed_out() -> None:
    """The endpoint generates in tasks of its own, which are still being cancelled when the rollout has ended."""
    asked: set[asyncio.Task[Any]] = set()

    async def asks_from_another_task(context: WorkflowContext) -> None:
        asked.add(asyncio.create_task(context.policy().generate([1], context.sampling)))
        await asyncio.sleep(3600)

    assert await played_late(asks_from_another_task, latency_s=3600.0) == RolloutTimeoutError.reason
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_what_fails_while_a_late_rollout_cleans_up_is_infrastructure_and_not_played_again() -> None:
    runs = []

    async def breaks_at_the_end(context: WorkflowContext) -> None:
        runs.append(1)
        try:
            await asyncio.sleep(3600)
        finally:
            raise InfrastructureError("the gateway is gone")

    assert await played_late(breaks_at_the_end) == "INFRASTRUCTURE"
    assert len(runs) == 1


async def test_a_late_rollout_of_an_ill_engine_is_left_to_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    player, records, _, policy = await make_player(latency_s=3600.0)
    player.play(make_order(indices=(0,), timeout_s=0.05))
    ill = dataclasses.replace(policy.engine.health(), ok=False, detail="a CUDA error")
    monkeypatch.setattr(policy.engine, "health", lambda: ill)
    await player.wait_until_idle()
    assert records.all == []


async def test_a_cancelled_group_leaves_nothing_and_can_be_ordered_again() -> None:
    player, records, workflow, _ = await make_player(forever, num_slots=2)
    player.play(make_order(indices=range(4)))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert player.cancel("g0") == 4
    assert player.cancel("unknown") == 0
    workflow._before = None
    assert player.play(make_order(indices=(1,))) == 1
    await player.wait_until_idle()
    assert [t.index for t in records.trajectories] == [1]
    assert records.failures == []
    assert player.num_free_slots == 2


async def test_an_evaluation_on_another_version_is_refused_as_stale_and_may_come_again() -> None:
    player, records, _, policy = await make_player()
    order = make_order(indices=(0,), required_versions={"model0": 3})
    await played(player, order)
    assert [f.reason for f in records.failures] == [WeightsStaleError.reason]
    await policy.engine.update(WeightUpdate.full({}, 3))
    assert player.play(order) == 1
    await player.wait_until_idle()
    assert len(records.trajectories) == 1


async def test_an_evaluation_that_saw_a_swap_is_stale() -> None:
    async def swap(context: WorkflowContext) -> None:
        await policy.engine.update(WeightUpdate.full({}, 4))

    player, records, _, policy = await make_player(swap)
    await played(player, make_order(indices=(0,), required_versions={"model0": 0}))
    assert [f.reason for f in records.failures] == [WeightsStaleError.reason]


async def test_slots_of_a_group_draw_different_numbers_and_repeating_one_draws_the_same() -> None:
    async def seeds_of_a_run() -> dict[int, int | None]:
        player, _, _, policy = await make_player()
        await played(player, make_order(seed=5))
        requests = policy.engine.requests  # type: ignore[attr-defined]
        return {int(r.request_id.split("/")[1]): r.seed for r in requests}

    first, second = await seeds_of_a_run(), await seeds_of_a_run()
    assert first == second
    assert len(set(first.values())) == 4


async def test_a_dead_engine_leaves_slots_open_for_another_replica() -> None:
    player, records, _, policy = await make_player()
    await policy.engine.stop()
    await played(player, make_order())
    assert records.all == []


async def test_an_outcome_without_a_number_is_a_failure() -> None:
    class Broken(Told):
        async def run(self, task: Task, context: WorkflowContext) -> Outcome:
            outcome = await super().run(task, context)
            return Outcome(sequences=outcome.sequences, reward=float("nan"))

    player, records, _, _ = await make_player(kind=Broken)
    await played(player, make_order(indices=(0,)))
    assert [f.reason for f in records.failures] == ["ValueError"]


async def test_what_a_users_workflow_does_wrong_is_told_with_its_line() -> None:
    class ReturnsItsReward(Told):
        async def run(self, task: Task, context: WorkflowContext) -> Outcome:
            await super().run(task, context)
            return 1.0  # type: ignore[return-value]

    for kind, before, told in (
        (
            ReturnsItsReward,
            None,
            "ReturnsItsReward.run returned float, and no Outcome: write `return chat.outcome(reward)`",
        ),
        (Told, raises(KeyError("answer")), "'answer'"),
    ):
        player, records, _, _ = await make_player(before, kind=kind)
        await played(player, make_order(indices=(0,)))
        (failure,) = records.failures
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+: {re.escape(told)}", failure.detail)


async def test_a_source_with_a_workflow_of_its_own_is_played_by_that_one() -> None:
    """The others, and other purposes of a dataset of the same name, are played by that of their purpose."""
    player, records, usual, policy = await make_player()
    own = Told(SingleTurnSettings(), None)
    workflows: dict[PlayedBy, Workflow] = {**dict.fromkeys(Purpose, usual), (Purpose.TRAIN, "code"): own}
    player = RolloutPlayer(
        workflows=workflows, policies={"model0": policy}, gateway=FakeGateway(), sink=records, replica_id="a",
        num_slots=8, infra_retries=0,
    )  # fmt: skip
    for number, (source, purpose) in enumerate(
        [("code", Purpose.TRAIN), ("maths", Purpose.TRAIN), ("code", Purpose.EVALUATION), ("", Purpose.TRAIN)]
    ):
        order = dataclasses.replace(
            make_order(indices=(0,)), task_group_id=f"g{number}", source=source, purpose=purpose
        )
        await played(player, order)
    assert (own.num_runs, usual.num_runs) == (1, 3)
