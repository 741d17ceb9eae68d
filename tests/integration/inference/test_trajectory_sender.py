"""Records over a real stream: acknowledged once, sent again without an acknowledgement, bounded without a receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import structlog

from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.records import RolloutFailure, Segment, StopReason, TokenSequence, Trajectory
from services.common.rpc.client import channel
from services.common.telemetry.logs import LogEvent
from services.inference.records_out import TOO_LARGE, TrajectorySender
from tests.integration.inference.peers import FakeOrchestrator, indices_of
from tests.waiting import WAIT_S, until


@asynccontextmanager
async def sending(orchestrator: FakeOrchestrator, **settings: float) -> AsyncIterator[TrajectorySender]:
    async with channel(orchestrator.address) as connection:
        stub = pool_pb2_grpc.PoolServiceStub(connection)
        sender = TrajectorySender(stub, replica_id="a", incarnation="i1", **settings)
        task = asyncio.create_task(sender.run())
        yield sender
        assert not task.done(), "the sender gave up"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def failure(index: int) -> RolloutFailure:
    return RolloutFailure(task_group_id="g", index=index, reason="TEST")


async def test_every_record_is_acknowledged_once(orchestrator: FakeOrchestrator) -> None:
    async with sending(orchestrator) as sender:
        for index in range(50):
            await sender.send(failure(index))
        await sender.wait_until_acknowledged(WAIT_S)
        assert sender.num_unacknowledged == 0
    assert indices_of(orchestrator.slots) == list(range(50))
    assert [r.record_number for r in orchestrator.records] == list(range(1, 51))
    assert sender.outcomes == {"RECORD_OUTCOME_ACCEPTED": 50}
    assert orchestrator.senders == {("a", "i1")}


async def test_records_that_follow_one_another_share_a_message_and_a_lone_one_waits_for_none(
    orchestrator: FakeOrchestrator,
) -> None:
    async with sending(orchestrator, linger_s=2.0) as sender:
        await sender.send(failure(0))
        await until(lambda: len(orchestrator.records) == 1, "a lone record is sent at once")
        for index in range(1, 40):
            await sender.send(failure(index))
            await asyncio.sleep(0)
        await sender.wait_until_acknowledged(20.0)
    assert orchestrator.message_sizes == [1, 39]
    assert indices_of(orchestrator.slots) == list(range(40))


async def test_only_what_was_not_acknowledged_is_sent_again_in_its_order(orchestrator: FakeOrchestrator) -> None:
    orchestrator.acknowledge = lambda request: request.failure.index in (0, 1, 4)
    async with sending(orchestrator) as sender:
        for index in range(6):
            await sender.send(failure(index))
        await until(lambda: sender.num_unacknowledged == 3, "three acknowledgements")
        await orchestrator.stop()
        orchestrator.acknowledge = lambda request: True
        await orchestrator.start()
        await sender.wait_until_acknowledged(WAIT_S)
    assert indices_of(orchestrator.slots) == [0, 1, 2, 3, 4, 5, 2, 3, 5]
    assert [r.record_number for r in orchestrator.records[6:]] == [1, 2, 3]


async def test_a_full_sender_makes_rollouts_wait(orchestrator: FakeOrchestrator) -> None:
    orchestrator.acknowledge = lambda request: False
    async with sending(orchestrator, max_unacknowledged=2) as sender:
        await sender.send(failure(0))
        await sender.send(failure(1))
        third = asyncio.create_task(sender.send(failure(2)))
        await until(lambda: len(orchestrator.records) == 2)
        assert not third.done()
        orchestrator.acknowledge = lambda request: True
        await orchestrator.stop()
        await orchestrator.start()
        async with asyncio.timeout(WAIT_S):
            await third
        await sender.wait_until_acknowledged(WAIT_S)
    assert indices_of(orchestrator.slots) == [0, 1, 0, 1, 2]


async def test_a_trajectory_that_no_message_holds_becomes_a_failure_of_its_slot(orchestrator: FakeOrchestrator) -> None:
    """600,000 tokens with their log-probabilities are more than 4 MiB."""
    many = np.zeros(600_000, dtype=np.int32)
    segment = Segment.policy(many, many.astype(np.float32), 0)
    sequence = TokenSequence(policy="model0", segments=(segment,), reward=1.0, stop_reason=StopReason.STOP)
    async with sending(orchestrator) as sender:
        await sender.send(Trajectory(task_group_id="g", index=0, sequences=(sequence,), reward=1.0))
        await sender.send(failure(1))
        await sender.wait_until_acknowledged(WAIT_S)
    assert indices_of(orchestrator.slots) == [0, 1]
    assert [record.failure.reason for record in orchestrator.records] == [TOO_LARGE, "TEST"]
    assert "bytes; at most 4194240" in orchestrator.records[0].failure.detail


@pytest.mark.parametrize(
    ("outcome", "number", "reason"),
    [
        (pool_pb2.RECORD_OUTCOME_INVALID, pool_pb2.REFUSAL_REASON_TOKEN_ID, "token_id"),
        (pool_pb2.RECORD_OUTCOME_REFUSED, pool_pb2.REFUSAL_REASON_NOT_THE_OWNER, "not_the_owner"),
        (pool_pb2.RECORD_OUTCOME_INVALID, 0, "other"),  # an orchestrator that does not say
    ],
)
async def test_what_is_refused_is_counted_by_reason_told_once_and_not_sent_again(
    orchestrator: FakeOrchestrator, outcome: pool_pb2.RecordOutcome.ValueType, number: int, reason: str
) -> None:
    orchestrator.answer = pool_pb2.RecordAck(outcome=outcome, reason=number, detail="id 99999")  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        async with sending(orchestrator) as sender:
            for index in range(20):
                await sender.send(failure(index))
            await sender.wait_until_acknowledged(WAIT_S)
            assert sender.refused == {reason: 20}
    assert len(orchestrator.records) == 20
    told = [entry for entry in logs if entry["event"] == LogEvent.TRAJECTORIES_REFUSED]
    assert [(entry["reason"], entry["detail"], entry["log_level"]) for entry in told] == [(reason, "id 99999", "error")]
