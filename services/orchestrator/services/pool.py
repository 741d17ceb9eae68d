"""The calls of replicas and of their gateway: membership, reports, records.

Records of a trajectory stream are acknowledged as they become durable, up to ``MAX_ACKS`` per message. A single
acknowledgement is sent at once; in a stream of them, ``LINGER_S`` follows each message that is not full. Only the memory of the sender waits for an acknowledgement: the sender keeps unacknowledged records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import grpc
import structlog

from services.common.aio import deadline
from services.common.errors import ConfigError, InvalidRequestError
from services.common.net.hosts import address, check_place
from services.common.pb import (
    pool_pb2,
    pool_pb2_grpc,
    weights_pb2,
)
from services.common.records import (
    DeviceTurn,
    FetchPlan,
    Interval,
    Refusal,
    RefusalReason,
    RolloutFailure,
    RunCount,
    Trajectory,
    WeightTransfer,
    WeightVersion,
)
from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.logs import LogEvent
from services.common.wire import REFUSAL_NUMBERS, duration_to_proto, read, write
from services.orchestrator.groups import Outcome
from services.orchestrator.ingest import INVALID_RECORD, Answer
from services.orchestrator.members import (
    MOST_NAME,
    AnnounceVersion,
    CancelGroup,
    Held,
    Hello,
    LeavePool,
    PlayGroup,
    Replica,
    ReplicaCommand,
    UseGateway,
    check_id,
    check_number,
    possible_intervals,
)
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.stalls import Hold

log = structlog.get_logger()

T = TypeVar("T")  # the answer to a record
Context = grpc.aio.ServicerContext[Any, Any]
Sent = pool_pb2.StreamTrajectoriesRequest | pool_pb2.NumberedRecord

MAX_ACKS = 64  # in one message
LINGER_S = 0.05  # after a message that is not full
MAX_OPEN = 256  # records read and not yet acknowledged: beyond this the stream is not read
LAST_ACKS_S = 4.0  # below the server's grace
MOST_DETAIL = 512  # characters of an acknowledgement
MOST_TEXT = 1024  # characters of an address
MOST_SLOTS = 1 << 20
MOST_SAMPLED = 10**15  # tokens of a process


class GatewayApi:
    """Membership of the environment gateway: tells replicas its address, and issues no tasks during its absence.

    On node 0 the recipe has the address, and no task waits for the gateway. A gateway on another node reports its own
    address; during its absence the dispatcher issues no task, because rollouts without a gateway fail.
    """

    def __init__(self, core: OrchestratorCore) -> None:
        self._config = core.recipe.envgateway
        self._pool = core.pool
        self._dispatcher = core.dispatcher
        self._is_elsewhere = self._config is not None and self._config.node != 0
        self._joined: list[str] = []  # addresses of the streams, newest last
        self._known = ""  # of the gateway on another node that joined last
        self._changed()

    @property
    def address(self) -> str:
        """Address for replicas; empty where the run has no gateway, or before its first join."""
        if self._config is None or self._is_elsewhere:
            return self._known
        return address(self._config.host, self._config.port)

    def join(self, place: str) -> None:
        """Register a gateway's stream.

        Raises ``InvalidRequestError`` for a run without a gateway, and for an address that cannot be dialled.
        """
        if self._config is None:
            raise InvalidRequestError("this run has no environment gateway (envgateway: null)")
        try:
            check_place(place)
        except ConfigError as error:
            raise InvalidRequestError(error.message) from None
        self._joined.append(place)
        log.info("envgateway.joined", address=place)
        self._changed()

    def left(self, place: str) -> None:
        """Remove a gateway whose stream has ended."""
        self._joined.remove(place)
        log.info("envgateway.left", address=place)
        self._changed()

    def _changed(self) -> None:
        if self._config is None or not self._is_elsewhere:
            return
        if self._joined and self._joined[-1] != self._known:
            self._known = self._joined[-1]
            for replica in self._pool:
                self._pool.send(replica, UseGateway(self._known))
        away = f"the environment gateway of node {self._config.node} (envgateway.node) has not joined, or has left"
        self._dispatcher.hold(Hold.GATEWAY, "" if self._joined else away)


class AckQueue(Generic[T]):
    """Acknowledgements of one stream. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ready: deque[tuple[int, T]] = deque()
        self._num_open = 0  # records without an acknowledgement that was taken
        self._answered = asyncio.Event()  # the sender checks the queue
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = asyncio.Event()

    def open(self, number: int) -> Callable[[T], None]:
        """Register a received record; returns the callback for its outcome."""
        self._num_open += 1
        if self._num_open >= MAX_OPEN:
            self._has_room.clear()
        return partial(self._answer, number)

    def _answer(self, number: int, outcome: T) -> None:
        self._ready.append((number, outcome))
        self._answered.set()

    @property
    def full(self) -> bool:
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Wait until fewer than ``MAX_OPEN`` are unanswered; has no deadline, because the disk sets the pace."""
        await self._has_room.wait()

    def end(self) -> None:
        """Mark the end of the stream: no further record follows."""
        self._ended.set()
        self._answered.set()

    async def next(self) -> list[tuple[int, T]]:
        """The next acknowledgements; empty after the end of the stream when all are taken."""
        while True:
            taken = [self._ready.popleft() for _ in range(min(MAX_ACKS, len(self._ready)))]
            self._num_open -= len(taken)
            if self._num_open < MAX_OPEN:
                self._has_room.set()
            if taken or (self._ended.is_set() and not self._num_open):
                return taken
            self._answered.clear()
            await self._answered.wait()

    async def linger(self) -> None:
        """Let later answers share a message; returns at once after the end of the stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._ended.wait()


class PoolServicer(pool_pb2_grpc.PoolServiceServicer):
    def __init__(self, core: OrchestratorCore) -> None:
        self._core = core
        self._gateway = GatewayApi(core)
        self.closing = asyncio.Event()

    def join(self, hello: Hello) -> Replica:
        """Add a replica to the pool, return its running work, and announce the versions that the replica should hold."""
        before = self._core.pool.get(hello.replica_id)
        if before is not None and before.incarnation != hello.incarnation:
            log.warning(
                LogEvent.REPLICA_REPLACED,
                replica=hello.replica_id,
                incarnation=before.incarnation,
                by=hello.incarnation,
            )
        replica = self._core.pool.join(hello)
        self._core.lost.pop(replica.component, None)
        log.info(
            LogEvent.REPLICA_JOINED, replica=hello.replica_id, incarnation=hello.incarnation, slots=hello.num_slots
        )
        # Version 0 of a policy without a trainer (an untrained policy, a run that only evaluates): the first replica reports
        # its loaded digest, and every other replica must hold the same.
        for policy, held in hello.held.items():
            trained = self._core.num_steps > 0 and policy in self._core.batches
            if not trained and self._core.ledgers[policy].newest is None and held.number == 0:
                self._core.adopt_version(WeightVersion(policy=policy, number=0, digest=held.digest))
        self._core.dispatcher.adopt(replica, hello.running)
        self._core.dispatcher.rejoined(replica)
        self._core.turns.replica_joined(replica)
        if self._core.control.ended:
            self._core.pool.send(replica, LeavePool(f"the run has {self._core.control.phase.value}"))
        elif replica.draining:
            self._core.pool.send(replica, LeavePool("draining"))
        return replica

    def report(self, replica_id: str, incarnation: str, *, emission: Iterable[Interval], **report: Any) -> None:
        """Renew the lease with a ``report`` of ``ReplicaPool.report``; raises LeaseLostError for an ended lease or the lease
        of another incarnation."""
        before = self._core.pool.takers
        replica = self._core.pool.report(replica_id, incarnation, **report)
        self._core.turns.settle()
        self._core.counters[RunCount.TOKENS_SAMPLED.value] += replica.new_tokens
        self._core.timeline.emitted(emission)
        self._core.dispatcher.announcer.sync(replica)
        if self._core.pool.takers != before:  # otherwise its availability is unchanged, as in most reports
            self._core.dispatcher.schedule()

    # --- RPCs -----------------------------------------------------------------------------------------------------------

    # A coroutine that writes, not a generator: each command then passes two frames fewer.
    async def JoinPool(  # type: ignore[override]
        self, request: pool_pb2.JoinPoolRequest, context: Context
    ) -> None:
        check_id("replica_id", request.replica_id)
        check_id("incarnation", request.incarnation)
        replica = self.join(
            Hello(
                replica_id=request.replica_id,
                incarnation=request.incarnation,
                num_slots=check_number("num_slots", request.num_slots, 1, MOST_SLOTS),
                held=self._held(request.held_versions),
                running=tuple(request.running_task_group_ids),
                weights_address=request.weights_address[:MOST_TEXT],
            )
        )
        mailbox = replica.mailbox
        assert mailbox is not None
        try:
            await context.write(self._welcome(self._gateway.address))
            while (command := await mailbox.get()) is not None:
                await context.write(self._command(command))
        finally:
            self._core.pool.stream_ended(replica, mailbox)
            log.info("replica.stream_ended", replica=request.replica_id)

    def _held(self, versions: Iterable[pool_pb2.HeldVersion]) -> dict[str, Held]:
        """Raises InvalidRequestError for an unknown policy, or an impossible version."""
        held = {version.policy: Held(version.number, version.digest) for version in versions}
        for policy, version in held.items():
            if policy not in self._core.ledgers:
                known = ", ".join(sorted(self._core.ledgers))
                raise InvalidRequestError(
                    f"held_versions names the policy {policy[:MOST_NAME]!r}; this run has {known}"
                )
            check_number(f"the held version of {policy}", version.number, -1)
            if len(version.digest) > MOST_NAME:
                raise InvalidRequestError(f"the digest of {policy} has {len(version.digest)} characters")
        return held

    def _welcome(self, gateway: str) -> pool_pb2.JoinPoolResponse:
        return pool_pb2.JoinPoolResponse(
            welcome=pool_pb2.Welcome(
                run_id=self._core.run_id,
                lease=duration_to_proto(self._core.pool.lease_s),
                envgateway_address=gateway,
            )
        )

    def _command(self, command: ReplicaCommand) -> pool_pb2.JoinPoolResponse:
        match command:
            case PlayGroup(order):
                response = pool_pb2.JoinPoolResponse()
                write(order, response.run_task_group)
                return response
            case CancelGroup(task_group_id, reason):
                cancel = pool_pb2.CancelTaskGroup(task_group_id=task_group_id, reason=reason)
                return pool_pb2.JoinPoolResponse(cancel_task_group=cancel)
            case AnnounceVersion(version, plan):
                return _announced(version, plan, self._core.run_id)
            case DeviceTurn():
                return pool_pb2.JoinPoolResponse(device_turn=write(command, pool_pb2.DeviceTurn()))
            case LeavePool(reason):
                return pool_pb2.JoinPoolResponse(drain=pool_pb2.Drain(reason=reason))
            case UseGateway(address):
                return self._welcome(address)

    async def JoinGateway(
        self, request: pool_pb2.JoinGatewayRequest, context: Context
    ) -> AsyncIterator[pool_pb2.JoinGatewayResponse]:
        self._gateway.join(request.address)
        try:
            yield pool_pb2.JoinGatewayResponse(welcome=pool_pb2.GatewayWelcome(run_id=self._core.run_id))
            # Without a deadline: until this process ends, when replicas, which may still call the gateway, have left.
            await self.closing.wait()
            if self._core.control.ended:
                reason = f"the run has {self._core.control.phase.value}"
                yield pool_pb2.JoinGatewayResponse(leave=pool_pb2.Drain(reason=reason))
        finally:
            self._gateway.left(request.address)

    async def StreamReports(  # type: ignore[override]  # a coroutine that writes, so that no write is cancelled
        self, request_iterator: AsyncIterator[pool_pb2.StreamReportsRequest], context: Context
    ) -> None:
        writing = asyncio.Lock()  # gRPC cannot end a call in the middle of a write

        async def answer() -> None:
            async for request in request_iterator:
                noted = self._note_report(request)
                async with writing:
                    await context.write(noted)

        async with self._until_closing(answer()) as (reader,):
            if reader.done():
                reader.result()
            async with writing:
                reader.cancel()

    def _note_report(self, request: pool_pb2.StreamReportsRequest) -> pool_pb2.StreamReportsResponse:
        self.report(
            request.replica_id,
            request.incarnation,
            held=self._held(request.held_versions),
            num_tokens=check_number("num_generated_tokens", request.num_generated_tokens, 0, MOST_SAMPLED),
            emission=possible_intervals((each.start_s, each.end_s) for each in request.emission_intervals),
            running=request.running_task_group_ids if request.accounts else None,
            accounts=tuple([read(AccountState, account) for account in request.accounts]),
            peers=tuple([read(PeerState, peer) for peer in request.peers]),
            device_turn=request.device_turn,
        )
        for proto in request.weight_transfers:
            transfer = read(WeightTransfer, proto)
            if transfer.policy in self._core.ledgers:
                self._core.metrics.weight_transfer(request.replica_id, transfer)
        return _answer_to_report(self._core.pool.lease_s, self._core.pool.report_every_s)

    async def StreamTrajectories(  # type: ignore[override]  # a coroutine that writes acknowledgements beside reading
        self, request_iterator: AsyncIterator[pool_pb2.StreamTrajectoriesRequest], context: Context
    ) -> None:
        acks: AckQueue[Answer] = AckQueue()
        async with self._until_closing(self._read(request_iterator, acks), _send_acks(acks, context)) as (
            reader,
            writer,
        ):
            # The peer has ended the stream or sent an unreadable record, or the service stops: acknowledge the records
            # read so far. Report the peer's mistake only after that: gRPC cannot end a call in the middle of a write.
            reader.cancel()
            acks.end()
            async with deadline(LAST_ACKS_S, f"the last acknowledgements to {context.peer()}"):
                await writer
            if reader.done() and not reader.cancelled():
                reader.result()

    @contextlib.asynccontextmanager
    async def _until_closing(self, *work: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
        """The tasks of a stream, when one of them has ended or the service stops; all have ended after the body."""
        tasks = [asyncio.ensure_future(part) for part in work]
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait([*tasks, closing], return_when=asyncio.FIRST_COMPLETED)
            yield tasks
        finally:
            for task in (*tasks, closing):
                task.cancel()
            await asyncio.gather(*tasks, closing, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pool_pb2.StreamTrajectoriesRequest], acks: AckQueue[Answer]) -> None:
        async for request in requests:
            sender = request.replica_id, request.incarnation
            # A message with no record at all is read as one, and refused.
            sent_records: list[Sent] = list(request.records)
            if request.WhichOneof("record") is not None or not request.records:
                sent_records.insert(0, request)
            for sent in sent_records:
                record, fault = _record(sent, request.replica_id)  # one that is none has no acknowledgement to wait for
                self._core.ingest.submit(record, acks.open(sent.record_number), sender, fault)
                if acks.full:
                    await acks.room()


@lru_cache(64)
def _announced(version: WeightVersion, plan: FetchPlan | None, run_id: str) -> pool_pb2.JoinPoolResponse:
    """One message for all replicas that get the same announcement: those that are no relay."""
    announced = pool_pb2.NewVersion(
        version=write(version, weights_pb2.WeightVersion(run_id=run_id)),
        plan=write(plan, pool_pb2.FetchPlan()) if plan is not None else None,
    )
    return pool_pb2.JoinPoolResponse(new_version=announced)


@lru_cache(16)
def _answer_to_report(lease_s: float, report_every_s: float) -> pool_pb2.StreamReportsResponse:
    """One message for all replicas of a pool."""
    return pool_pb2.StreamReportsResponse(
        lease=duration_to_proto(lease_s), next_report=duration_to_proto(report_every_s)
    )


async def _send_acks(acks: AckQueue[Answer], context: Context) -> None:
    while ready := await acks.next():
        await context.write(
            pool_pb2.StreamTrajectoriesResponse(acks=[_ack(number, answer) for number, answer in ready])
        )
        if len(ready) < MAX_ACKS:
            await acks.linger()


def _ack(number: int, answer: Answer) -> pool_pb2.RecordAck:
    ack = pool_pb2.RecordAck(
        record_number=number, outcome=pool_pb2.RecordOutcome.Value(f"RECORD_OUTCOME_{answer.outcome.name}")
    )
    if answer.refusal is not None:
        ack.reason = REFUSAL_NUMBERS[answer.refusal.reason]  # type: ignore[assignment]
        ack.detail = answer.refusal.detail[:MOST_DETAIL]
    return ack


def _record(sent: Sent, replica_id: str) -> tuple[Outcome, Refusal | None]:
    """The received records; for an unreadable one, its slot and the reason."""
    kind = sent.WhichOneof("record")
    if kind == "failure":
        return read(RolloutFailure, sent.failure, replica_id=replica_id), None
    if kind != "trajectory":
        raise InvalidRequestError(f"record {sent.record_number} holds neither a trajectory nor a failure")
    try:
        return read(Trajectory, sent.trajectory, replica_id=replica_id), None
    except InvalidRequestError as error:
        slot = RolloutFailure(
            task_group_id=sent.trajectory.task_group_id,
            index=sent.trajectory.index,
            reason=INVALID_RECORD,
            replica_id=replica_id,
        )
        return slot, Refusal(reason=RefusalReason.UNREADABLE, detail=error.message)
