"""The membrane to replicas and their gateway: convert, call the ring, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import structlog

from services.common import serde
from services.common.aio import deadline
from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.refusals import Refusal, RefusalReason
from services.common.serde_accounts import account_from_proto, peer_from_proto
from services.common.serde_refusals import refusal_reason_to_proto
from services.common.serde_transfers import weight_transfer_from_proto
from services.common.types import RolloutFailure
from services.orchestrator import report_bounds as bounds
from services.orchestrator.acks import AckQueue
from services.orchestrator.commands import (
    AnnounceVersion,
    CancelGroup,
    LeavePool,
    PlayGroup,
    ReplicaCommand,
    UseGateway,
)
from services.orchestrator.gateway_side import GatewaySide
from services.orchestrator.groups import Outcome
from services.orchestrator.ingest import INVALID_RECORD, Answer, RecordOutcome
from services.orchestrator.pool import Held, Hello
from services.orchestrator.replica_side import ReplicaSide
from services.orchestrator.ring import Ring

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

LAST_ACKS_S = 4.0  # below the server's grace
MOST_DETAIL = 512  # characters of an acknowledgement

_OUTCOME = {
    RecordOutcome.ACCEPTED: pool_pb2.RECORD_OUTCOME_ACCEPTED,
    RecordOutcome.DUPLICATE: pool_pb2.RECORD_OUTCOME_DUPLICATE,
    RecordOutcome.UNKNOWN: pool_pb2.RECORD_OUTCOME_UNKNOWN,
    RecordOutcome.INVALID: pool_pb2.RECORD_OUTCOME_INVALID,
    RecordOutcome.REFUSED: pool_pb2.RECORD_OUTCOME_REFUSED,
}


class PoolServicer(pool_pb2_grpc.PoolServiceServicer):
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._side = ReplicaSide(ring)
        self._gateway = GatewaySide(ring)
        self.closing = asyncio.Event()

    async def JoinPool(
        self, request: pool_pb2.JoinPoolRequest, context: Context
    ) -> AsyncIterator[pool_pb2.JoinPoolResponse]:
        bounds.check_id("replica_id", request.replica_id)
        bounds.check_id("incarnation", request.incarnation)
        replica = self._side.join(
            Hello(
                replica_id=request.replica_id,
                incarnation=request.incarnation,
                num_slots=bounds.check_number("num_slots", request.num_slots, 1, bounds.MOST_SLOTS),
                held=self._held(request.held_versions),
                running=tuple(request.running_task_group_ids),
                labels=bounds.texts(request.labels),
                weights_address=request.weights_address[: bounds.MOST_TEXT],
            )
        )
        mailbox = replica.mailbox
        assert mailbox is not None
        try:
            yield self._welcome(self._gateway.address)
            while (command := await mailbox.get()) is not None:
                yield self._command(command)
        finally:
            self._ring.pool.stream_ended(replica, mailbox)
            log.info("replica.stream_ended", replica=request.replica_id)

    def _held(self, versions: Iterable[pool_pb2.HeldVersion]) -> dict[str, Held]:
        held = {version.policy: Held(version.number, version.digest) for version in versions}
        return bounds.check_held(held, self._ring.ledgers)

    def _welcome(self, gateway: str) -> pool_pb2.JoinPoolResponse:
        return pool_pb2.JoinPoolResponse(
            welcome=pool_pb2.Welcome(
                run_id=self._ring.run_id,
                lease=serde.duration_to_proto(self._ring.pool.lease_s),
                envgateway_address=gateway,
            )
        )

    def _command(self, command: ReplicaCommand) -> pool_pb2.JoinPoolResponse:
        match command:
            case PlayGroup(order):
                return pool_pb2.JoinPoolResponse(run_task_group=serde.order_to_proto(order))
            case CancelGroup(task_group_id, reason):
                cancel = pool_pb2.CancelTaskGroup(task_group_id=task_group_id, reason=reason)
                return pool_pb2.JoinPoolResponse(cancel_task_group=cancel)
            case AnnounceVersion(version, plan):
                announced = pool_pb2.NewVersion(
                    version=serde.weight_version_to_proto(version, self._ring.run_id),
                    plan=serde.fetch_plan_to_proto(plan) if plan is not None else None,
                )
                return pool_pb2.JoinPoolResponse(new_version=announced)
            case LeavePool(reason):
                return pool_pb2.JoinPoolResponse(drain=pool_pb2.Drain(reason=reason))
            case UseGateway(address):
                return self._welcome(address)

    async def JoinGateway(
        self, request: pool_pb2.JoinGatewayRequest, context: Context
    ) -> AsyncIterator[pool_pb2.JoinGatewayResponse]:
        number = self._gateway.join(request.address)
        try:
            yield pool_pb2.JoinGatewayResponse(welcome=pool_pb2.GatewayWelcome(run_id=self._ring.run_id))
            # Without a deadline: until this process ends, when replicas, which may still call the gateway, have left.
            await self.closing.wait()
            if self._ring.control.ended:
                reason = f"the run has {self._ring.control.phase.value}"
                yield pool_pb2.JoinGatewayResponse(leave=pool_pb2.Drain(reason=reason))
        finally:
            self._gateway.left(number)

    async def ReportReplica(
        self, request: pool_pb2.ReportReplicaRequest, context: Context
    ) -> pool_pb2.ReportReplicaResponse:
        self._side.report(
            request.replica_id,
            request.incarnation,
            held=self._held(request.held_versions),
            num_tokens=bounds.check_number("num_generated_tokens", request.num_generated_tokens, 0, bounds.MOST_TOKENS),
            emission=bounds.intervals(serde.interval_from_proto(interval) for interval in request.emission_intervals),
            gauges=bounds.gauges(request.gauges),
            running=request.running_task_group_ids if request.accounts else None,
            accounts=bounds.accounts(account_from_proto(account) for account in request.accounts),
            peers=bounds.peers(peer_from_proto(peer) for peer in request.peers),
        )
        for proto in request.weight_transfers:
            transfer = bounds.transfer(weight_transfer_from_proto(proto))
            if transfer.policy in self._ring.ledgers:
                self._ring.metrics.weight_transfer(request.replica_id, transfer)
        return pool_pb2.ReportReplicaResponse(lease=serde.duration_to_proto(self._ring.pool.lease_s))

    async def StreamTrajectories(  # type: ignore[override]  # a coroutine that writes acknowledgements beside reading
        self, request_iterator: AsyncIterator[pool_pb2.StreamTrajectoriesRequest], context: Context
    ) -> None:
        acks: AckQueue[Answer] = AckQueue()
        reader = asyncio.ensure_future(self._read(request_iterator, acks))
        writer = asyncio.ensure_future(_send_acks(acks, context))
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait({reader, writer, closing}, return_when=asyncio.FIRST_COMPLETED)
            # The peer has ended the stream, or sent what is no record, or we are stopping: what was read is still
            # acknowledged. Only then is the peer told of its mistake: gRPC cannot end a call in the middle of a write.
            reader.cancel()
            acks.end()
            async with deadline(LAST_ACKS_S, f"the last acknowledgements to {context.peer()}"):
                await writer
            if reader.done() and not reader.cancelled():
                reader.result()
        finally:
            for task in (reader, writer, closing):
                task.cancel()
            await asyncio.gather(reader, writer, closing, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pool_pb2.StreamTrajectoriesRequest], acks: AckQueue[Answer]) -> None:
        async for request in requests:
            record, fault = _record(request)  # one that is none has no acknowledgement to wait for
            sender = request.replica_id, request.incarnation
            self._ring.ingest.submit(record, acks.open(request.record_number), sender, fault)
            if acks.full:
                await acks.room()


async def _send_acks(acks: AckQueue[Answer], context: Context) -> None:
    while ready := await acks.next():
        await context.write(
            pool_pb2.StreamTrajectoriesResponse(acks=[_ack(number, answer) for number, answer in ready])
        )


def _ack(number: int, answer: Answer) -> pool_pb2.RecordAck:
    ack = pool_pb2.RecordAck(record_number=number, outcome=_OUTCOME[answer.outcome])
    if answer.refusal is not None:
        ack.reason = refusal_reason_to_proto(answer.refusal.reason)
        ack.detail = answer.refusal.detail[:MOST_DETAIL]
    return ack


def _record(request: pool_pb2.StreamTrajectoriesRequest) -> tuple[Outcome, Refusal | None]:
    """What came in; of what cannot be read as a record, its slot and why."""
    kind = request.WhichOneof("record")
    if kind == "failure":
        return serde.failure_from_proto(request.failure, request.replica_id), None
    if kind != "trajectory":
        raise InvalidRequestError(f"record {request.record_number} holds neither a trajectory nor a failure")
    try:
        return serde.trajectory_from_proto(request.trajectory, request.replica_id), None
    except InvalidRequestError as error:
        slot = RolloutFailure(
            task_group_id=request.trajectory.task_group_id,
            index=request.trajectory.index,
            reason=INVALID_RECORD,
            replica_id=request.replica_id,
        )
        return slot, Refusal(reason=RefusalReason.UNREADABLE, detail=error.message)
