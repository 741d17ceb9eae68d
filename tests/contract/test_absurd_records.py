"""Absurd records over real gRPC to a real orchestrator: each is refused with its reason, and the run trains on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer, report_once
from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2, pool_pb2_grpc, training_pb2, trajectory_pb2, weights_pb2
from services.common.records import RefusalReason as Reason
from services.common.rpc.client import channel, translated_errors
from services.common.wire import REFUSAL_NUMBERS, REFUSAL_REASONS
from tests.contract.absurd import ABSURD, CONTEXT, NEW_TOKENS, VOCABULARY, good
from tests.integration.orchestrator.conftest import Orchestrator
from tests.waiting import WAIT_S

Request = pool_pb2.StreamTrajectoriesRequest
INVALID, REFUSED = pool_pb2.RECORD_OUTCOME_INVALID, pool_pb2.RECORD_OUTCOME_REFUSED


class Playing(ScriptedReplica):
    """Takes orders and answers them on command only."""

    def __init__(self, address: str, replica_id: str = "a") -> None:
        super().__init__(address, replica_id=replica_id, num_slots=256, rollouts=Rollouts(latency_s=10_000.0))

    def slots(self) -> list[tuple[str, int]]:
        return [(order.task_group_id, index) for order in self.orders for index in order.indices]

    async def until_slots(self, number: int) -> list[tuple[str, int]]:
        async with asyncio.timeout(WAIT_S):
            while len(found := self.slots()) < number:
                await asyncio.sleep(0.02)
        return found

    def request(self, record: trajectory_pb2.Trajectory | trajectory_pb2.RolloutFailure) -> Request:
        made = Request(replica_id=self.replica_id, incarnation=self.incarnation)
        if isinstance(record, trajectory_pb2.Trajectory):
            made.trajectory.CopyFrom(record)
        else:
            made.failure.CopyFrom(record)
        return made


def together(requests: Iterable[Request]) -> Request:
    """The records of these messages, in one."""
    listed = list(requests)
    records = [
        pool_pb2.NumberedRecord(
            record_number=number,
            trajectory=one.trajectory if one.HasField("trajectory") else None,
            failure=one.failure if one.HasField("failure") else None,
        )
        for number, one in enumerate(listed, start=1)
    ]
    return Request(replica_id=listed[0].replica_id, incarnation=listed[0].incarnation, records=records)


async def send(address: str, requests: Iterable[Request]) -> list[pool_pb2.RecordAck]:
    """On a stream of their own; the acknowledgements, in the order of the records."""
    listed = list(requests)
    num_records = sum(max(1, len(request.records)) for request in listed)

    async def numbered() -> AsyncIterator[Request]:
        numbers = itertools.count(1)
        for request in listed:
            for record in request.records or [request]:
                record.record_number = next(numbers)
            yield request
        await done.wait()

    done, acks = asyncio.Event(), []
    async with asyncio.timeout(WAIT_S), channel(address) as connection:
        await connection.channel_ready()  # after a restart other channels of this process may still back off
        async for response in pool_pb2_grpc.PoolServiceStub(connection).StreamTrajectories(numbered()):
            acks += response.acks
            if len(acks) == num_records:
                done.set()
                break
    return sorted(acks, key=lambda ack: ack.record_number)


def reasons(acks: Iterable[pool_pb2.RecordAck]) -> list[Reason | None]:
    return [REFUSAL_REASONS.get(ack.reason) for ack in acks]


@pytest.fixture
async def orchestrator(tmp_path: Path) -> AsyncIterator[Orchestrator]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    made = Orchestrator(
        tmp_path / "run",
        policies__model0__model={"path": str(model), "context_length": CONTEXT},
        policies__model0__batch={"size": 16, "max_staleness": 8, "minibatches": 2},
        sampling__max_new_tokens=NEW_TOKENS,
        evaluation__at_start=False,
        evaluation__at_end=False,
    )
    await made.start()
    yield made
    made.close()


async def trains_on(orchestrator: Orchestrator, trainer: ScriptedTrainer, first_step: int) -> None:
    """A replica that plays well: a batch, a version; the orchestrator is killed and started again; another batch."""
    rollouts = Rollouts(num_tokens=8)
    rollouts._pieces = (bytes(32), rollouts._pieces[1])
    replica = ScriptedReplica(orchestrator.address, replica_id="a", num_slots=64, rollouts=rollouts)
    replica.held = {
        "model0": type(replica.held["model0"])(
            policy="model0", number=first_step - 1, digest=f"xxh3-128:model0-{first_step - 1}"
        )
    }
    replica.start()
    try:
        async with asyncio.timeout(WAIT_S):
            await trainer.train([first_step])
            await orchestrator.restart()
            await trainer.train([first_step + 1])
    finally:
        await replica.close()
    assert all(len(trainer.pulled[step].sequences) >= 16 for step in (first_step, first_step + 1))


async def test_every_absurd_record_is_refused_with_its_reason_and_the_run_trains_on(orchestrator: Orchestrator) -> None:
    assert len(ABSURD) >= 30
    trainer = ScriptedTrainer(orchestrator.address)
    replica = Playing(orchestrator.address)
    replica.start()
    try:
        await trainer.join()
        await trainer.publish(0)
        slots = await replica.until_slots(len(ABSURD))
        requests = []
        for (edit, _), (group, index) in zip(ABSURD.values(), slots, strict=False):
            record = good(group, index)
            edit(record)
            requests.append(replica.request(record))
        half = len(requests) // 2  # alone and together
        acks = await send(orchestrator.address, [*requests[:half], together(requests[half:])])
        told = dict(zip(ABSURD, reasons(acks), strict=True))
        assert told == {name: reason for name, (_, reason) in ABSURD.items()}
        assert {ack.outcome for ack in acks} == {INVALID}
        assert all(0 < len(ack.detail) <= 512 for ack in acks)
        counters = (await orchestrator.progress()).counters
        counted = Counter(f"refused_{reason.value}" for _, reason in ABSURD.values())
        assert {name: counters[name] for name in counted} == counted
        assert counters["records_invalid"] == counters["failures_invalid_record"] == len(ABSURD)
        await replica.close()
        await trains_on(orchestrator, trainer, first_step=1)
    finally:
        await replica.close()
        await trainer.close()


def held(policy: str = "model0", number: int = 0, digest: str = "d") -> pool_pb2.HeldVersion:
    return pool_pb2.HeldVersion(policy=policy, number=number, digest=digest)


async def refused(call: Awaitable[Any]) -> bool:
    """Whether a call ends as the caller's mistake."""
    try:
        with translated_errors("orchestrator"):
            await call
    except InvalidRequestError as error:
        return len(error.message) < 2000  # what it said is cut
    return False


@pytest.mark.slow
async def test_absurd_reports_are_the_callers_mistake_or_cut_and_the_run_is_as_before(
    orchestrator: Orchestrator,
) -> None:
    trainer = ScriptedTrainer(orchestrator.address)
    replica = Playing(orchestrator.address)
    replica.start()
    try:
        await trainer.join()
        await trainer.publish(0)
        await replica.until_slots(8)
        joins = [
            {"replica_id": "x" * 100_000},
            {"replica_id": "a\nb"},
            {"incarnation": ""},
            {"num_slots": 2**31 - 1},
            {"num_slots": -1},
            {"held_versions": [held("nobody")]},
            {"held_versions": [held(number=-9)]},
            {"held_versions": [held(number=2**62)]},
            {"held_versions": [held(digest="d" * 100_000)]},
        ]
        reports: list[dict[str, Any]] = [
            {"num_generated_tokens": -5},
            {"num_generated_tokens": 2**63 - 1},
            {"held_versions": [held("nobody")]},
        ]
        trained: list[dict[str, Any]] = [
            {"checkpoint_step": -1},
            {"training_step": -1},
            {"rank": -3},
            {"rank": 2**31 - 1},
        ]
        published: list[dict[str, Any]] = [
            {"number": -1},
            {"number": 2**62},
            {"number": 1, "digest": ""},
            {"number": 1, "digest": "d" * 100_000},
            {"number": 1, "sources": ["127.0.0.1:1"] * 5000},
        ]
        async with channel(orchestrator.address) as connection:
            pool, training = pool_pb2_grpc.PoolServiceStub(connection), trainer.stub
            good_join: dict[str, Any] = {"replica_id": "b", "incarnation": "1", "num_slots": 4}
            for change in joins:
                stream = pool.JoinPool(pool_pb2.JoinPoolRequest(**{**good_join, **change}), timeout=WAIT_S)
                assert await refused(stream.read()), change
            who = {"replica_id": replica.replica_id, "incarnation": replica.incarnation}
            for change in reports:
                assert await refused(report_once(pool, pool_pb2.StreamReportsRequest(**who, **change), WAIT_S))
            whose = {"policy": "model0", "incarnation": trainer.incarnation}
            for change in trained:
                request = training_pb2.ReportTrainerRequest(**whose, **change)
                assert await refused(training.ReportTrainer(request, timeout=WAIT_S)), change
            for change in published:
                version = weights_pb2.WeightVersion(policy="model0", **{"digest": "d", **change})
                announced = training_pb2.PublishVersionRequest(version=version, incarnation=trainer.incarnation)
                assert await refused(training.PublishVersion(announced, timeout=WAIT_S)), change
            huge = pool_pb2.StreamReportsRequest(**who, held_versions=replica._held())
            huge.emission_intervals.add().end_s = 1e300
            await report_once(pool, huge, WAIT_S)
        now = await orchestrator.progress()
        assert [found.replica_id for found in now.replicas] == ["a"]
        assert [policy.version for policy in now.policies] == [0]
        await replica.close()
        await trains_on(orchestrator, trainer, first_step=1)
    finally:
        await replica.close()
        await trainer.close()


def test_every_reason_has_a_number_on_the_wire_and_back() -> None:
    assert [REFUSAL_REASONS[REFUSAL_NUMBERS[reason]] for reason in Reason] == list(Reason)
    assert len(pool_pb2.RefusalReason.values()) == len(Reason) + 1
    assert REFUSAL_REASONS.get(0) is REFUSAL_REASONS.get(9999) is None
