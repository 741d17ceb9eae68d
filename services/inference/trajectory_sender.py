"""Sends records to the orchestrator and keeps each until it is acknowledged: what was not is sent again.

    send() --> waiting --> [writer of this stream] --> unacknowledged --> acknowledged: dropped
                 ^                                          |
                 '------- the stream broke: in order -------'

One bidirectional stream at a time with one writer task. The number of records not yet acknowledged is bounded:
beyond it ``send`` waits, and so rollouts stop, instead of memory growing while the orchestrator is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from typing import Protocol

import grpc
import structlog

from services.common.accounts import Activity, TimeAccount
from services.common.aio import backoff, deadline
from services.common.errors import MillraceError
from services.common.pb import pool_pb2
from services.common.repeats import Repeats
from services.common.rpc.channel import translated_errors
from services.common.rpc.limits import limit_of
from services.common.rpc.streams import call_cancellation_is_an_error
from services.common.serde import failure_to_proto, trajectory_to_proto
from services.common.serde_refusals import refusal_reason_from_proto
from services.common.types import RolloutFailure, Trajectory

log = structlog.get_logger(__name__)

MAX_UNACKNOWLEDGED = 4096
# Room for the record's number, which is set when it is sent.
MOST_RECORD_BYTES = limit_of("StreamTrajectories").request_bytes - 64
TOO_LARGE = "RECORD_TOO_LARGE"
NOTHING = Activity("nothing to send")
TELL_REFUSALS_S = 30.0  # of each reason one is told in the log
_NOT_TAKEN = (pool_pb2.RECORD_OUTCOME_INVALID, pool_pb2.RECORD_OUTCOME_REFUSED)

Request = pool_pb2.StreamTrajectoriesRequest
Response = pool_pb2.StreamTrajectoriesResponse


class TrajectoryStub(Protocol):
    """The part of ``PoolServiceStub`` that is used here."""

    def StreamTrajectories(self) -> grpc.aio.StreamStreamCall[Request, Response]: ...


class TrajectorySender:
    """``run`` lives as long as the service; ``send`` may be called from any task of the same loop."""

    def __init__(
        self, stub: TrajectoryStub, *, replica_id: str, incarnation: str, max_unacknowledged: int = MAX_UNACKNOWLEDGED
    ) -> None:
        self._stub = stub
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._room = asyncio.Semaphore(max_unacknowledged)
        self._waiting: deque[Request] = deque()
        self._unacknowledged: dict[int, Request] = {}  # by record number on the present stream, in order
        self._changed = asyncio.Event()  # there is something to write
        self._empty = asyncio.Event()
        self._empty.set()
        self.account = TimeAccount(f"replica/{replica_id}/records", rest=NOTHING)
        self.outcomes: Counter[str] = Counter()  # RecordOutcome names, e.g. RECORD_OUTCOME_ACCEPTED
        self.refused: Counter[str] = Counter()  # by reason
        self._repeats = Repeats(every_s=TELL_REFUSALS_S)
        self.num_streams = 0

    @property
    def num_unacknowledged(self) -> int:
        return len(self._waiting) + len(self._unacknowledged)

    async def send(self, record: Trajectory | RolloutFailure) -> None:
        """Hand over a record; returns when there is room for it, not when it is durable."""
        await self._room.acquire()  # released by acknowledgements; the caller's order limits how long it can matter
        request = Request(replica_id=self._replica_id, incarnation=self._incarnation)
        if isinstance(record, Trajectory):
            request.trajectory.CopyFrom(trajectory_to_proto(record))
            if (size := request.ByteSize()) > MOST_RECORD_BYTES:
                # The orchestrator would refuse it, and what is refused is sent again, for ever.
                record = _too_large(record, size)
        if isinstance(record, RolloutFailure):
            request.failure.CopyFrom(failure_to_proto(record))  # in place of the trajectory: one of two is set
        self._waiting.append(request)
        self._empty.clear()
        self._changed.set()

    async def wait_until_acknowledged(self, timeout_s: float) -> None:
        """Return when nothing is outstanding; ``DeadlineError`` otherwise."""
        async with deadline(timeout_s, "acknowledgement of all trajectories"):
            await self._empty.wait()

    async def run(self) -> None:
        """Keep a stream open for ever; cancel to end."""
        delays = backoff()
        while True:
            await self._something_to_send()
            self.num_streams += 1
            acknowledged = sum(self.outcomes.values())
            try:
                with translated_errors("orchestrator"), call_cancellation_is_an_error("StreamTrajectories"):
                    await self._one_stream()
                log.info("trajectories.stream_ended")
            except MillraceError as error:
                log.warning("trajectories.stream_broke", error=error.message)
                self.account.enter("waiting for a new stream", on="orchestrator", detail=error.message)
            self._take_back()
            if sum(self.outcomes.values()) > acknowledged:
                delays = backoff()
            await asyncio.sleep(next(delays))

    # -- one stream ---------------------------------------------------------------------------------------------

    async def _something_to_send(self) -> None:
        """Opening a stream that has nothing to say would hide from nobody that the orchestrator is away."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def _one_stream(self) -> None:
        call = self._stub.StreamTrajectories()
        writer = asyncio.create_task(self._write(call), name="trajectory writer")
        try:
            while isinstance(response := await call.read(), Response):
                for ack in response.acks:
                    self._acknowledge(ack)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await writer  # a broken stream breaks the writer, too; the reader has told why
            call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        number = 0
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            request = self._waiting.popleft()
            number += 1
            request.record_number = number
            _note_sending(request)
            # Before the write: a record that was written in part has to be sent again, too.
            self._unacknowledged[number] = request
            self.account.enter("waiting for acknowledgements", on="orchestrator")
            await call.write(request)

    def _acknowledge(self, ack: pool_pb2.RecordAck) -> None:
        if self._unacknowledged.pop(ack.record_number, None) is None:
            log.warning("trajectories.unknown_ack", record_number=ack.record_number)
            return
        self.account.beat()
        name = pool_pb2.RecordOutcome.Name(ack.outcome) if ack.outcome in pool_pb2.RecordOutcome.values() else "?"
        self.outcomes[name] += 1
        if ack.outcome in _NOT_TAKEN:
            self._note_refusal(ack)
        self._room.release()
        if not self._waiting and not self._unacknowledged:
            self._empty.set()
            self.account.enter(*NOTHING)

    def _note_refusal(self, ack: pool_pb2.RecordAck) -> None:
        """The orchestrator did not take a record, and will not: it is dropped. Its slot fails, or was never this replica's."""
        reason = refusal_reason_from_proto(ack.reason)
        name = "other" if reason is None else reason.value
        self.refused[name] += 1
        if (untold := self._repeats.tell(name)) is not None:
            log.error("trajectories.refused", reason=name, detail=ack.detail, so_far=self.refused[name], **untold)

    def _take_back(self) -> None:
        """What the broken stream did not acknowledge goes first on the next one, in its old order."""
        self._waiting.extendleft(reversed(self._unacknowledged.values()))
        self._unacknowledged.clear()


def _note_sending(request: Request) -> None:
    """What is sent again is on its way since the last time."""
    record = request.trajectory if request.WhichOneof("record") == "trajectory" else request.failure
    if record.HasField("timing"):
        record.timing.sent_at.FromNanoseconds(time.time_ns())
        record.timing.num_sends += 1


def _too_large(trajectory: Trajectory, size: int) -> RolloutFailure:
    log.error("trajectories.too_large", task_group=trajectory.task_group_id, index=trajectory.index, size_bytes=size)
    return RolloutFailure(
        task_group_id=trajectory.task_group_id,
        index=trajectory.index,
        reason=TOO_LARGE,
        detail=f"the trajectory has {size} bytes; at most {MOST_RECORD_BYTES} can be sent: shorten what a rollout may hold",
        replica_id=trajectory.replica_id,
    )
