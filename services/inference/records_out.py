"""Sends records to the orchestrator; keeps each record until the acknowledgement and sends it again on a new stream.

    send() --> waiting --> [writer of this stream: all that waits, in one message] --> unacknowledged --> acknowledged: dropped
                 ^                                          |
                 '------- the stream broke: in order -------'

One bidirectional stream at a time with one writer task. A lone record is sent at once; in a sequence of records, messages are at
least ``LINGER_S`` apart: a message costs both sides more than a record does, above all where rollouts end one by one.
``LINGER_S`` does not exceed the wait in the orchestrator's journal, so records are not delayed by the pause. The number
of unacknowledged records is bounded: at the bound ``send`` waits, so rollouts stop instead of memory growing while the
orchestrator is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable

import grpc
import structlog

from services.common.aio import backoff, deadline, ended
from services.common.errors import RollmillError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.records import RolloutFailure, Trajectory
from services.common.rpc.client import translated_errors
from services.common.security.identity import REQUEST_BYTES
from services.common.telemetry.accounts import ORCHESTRATOR, Activity, ActivityName, TimeAccount, records, replica
from services.common.telemetry.logs import LogEvent, Repeats
from services.common.wire import REFUSAL_REASONS, write

log = structlog.get_logger(__name__)
MAX_UNACKNOWLEDGED = 4096
# Room for the record's number, which is set when it is sent.
MOST_RECORD_BYTES = REQUEST_BYTES["StreamTrajectories"] - 64
MESSAGE_BYTES = 256 * 1024  # of several records in one message: a message for each costs more than its content
LINGER_S = 0.01  # between two messages
TOO_LARGE = "RECORD_TOO_LARGE"
NOTHING = Activity(ActivityName.NOTHING_TO_SEND)
TELL_REFUSALS_S = 30.0  # the log has one line per reason in this time
_OUTCOMES = {number: name for name, number in pool_pb2.RecordOutcome.items()}
_NOT_TAKEN = (pool_pb2.RECORD_OUTCOME_INVALID, pool_pb2.RECORD_OUTCOME_REFUSED)
Request = pool_pb2.StreamTrajectoriesRequest
Record = pool_pb2.NumberedRecord
Response = pool_pb2.StreamTrajectoriesResponse


class TrajectorySender:
    """``run`` lives as long as the service; ``send`` may be called from any task of the same loop."""

    def __init__(
        self,
        stub: pool_pb2_grpc.PoolServiceAsyncStub,
        *,
        replica_id: str,
        incarnation: str,
        max_unacknowledged: int = MAX_UNACKNOWLEDGED,
        linger_s: float = LINGER_S,
    ) -> None:
        self._stub = stub
        self._linger_s = linger_s
        self._replica_id, self._incarnation = replica_id, incarnation
        self._most_bytes = MOST_RECORD_BYTES - self._message(()).ByteSize()
        self._room = asyncio.Semaphore(max_unacknowledged)
        self._waiting: deque[Record] = deque()
        self._unacknowledged: dict[int, Record] = {}  # by record number on the present stream, in order
        self._changed = asyncio.Event()  # set when a record waits to be written
        self._empty = asyncio.Event()
        self._empty.set()
        self.account = TimeAccount(records(replica(replica_id)), rest=NOTHING)
        self.outcomes: Counter[str] = Counter()  # RecordOutcome names, e.g. RECORD_OUTCOME_ACCEPTED
        self.refused: Counter[str] = Counter()  # by reason
        self._repeats = Repeats(every_s=TELL_REFUSALS_S)
        self.num_streams = 0

    @property
    def num_unacknowledged(self) -> int:
        return len(self._waiting) + len(self._unacknowledged)

    async def send(self, record: Trajectory | RolloutFailure) -> None:
        """Hand over a record; returns when the queue has room for the record, not when the record is durable."""
        await self._room.acquire()  # released by acknowledgements; the order's time limit bounds the wait
        numbered = Record()
        if isinstance(record, Trajectory):
            write(record, numbered.trajectory)
            if (size := numbered.ByteSize()) > self._most_bytes:
                # The orchestrator would refuse the record, and a refused record would be sent again for ever.
                about = {"task_group": record.task_group_id, "index": record.index}
                log.error("trajectories.too_large", **about, size_bytes=size)
                record = RolloutFailure(
                    task_group_id=record.task_group_id,
                    index=record.index,
                    reason=TOO_LARGE,
                    detail=f"the trajectory has {size} bytes; at most {MOST_RECORD_BYTES} can be sent: shorten the rollouts",
                    replica_id=record.replica_id,
                )
        if isinstance(record, RolloutFailure):
            write(record, numbered.failure)  # replaces the trajectory: the two are a oneof
        self._waiting.append(numbered)
        self._empty.clear()
        self._changed.set()

    async def wait_until_acknowledged(self, timeout_s: float) -> None:
        """Return when every record is acknowledged. Raises ``DeadlineError``."""
        async with deadline(timeout_s, "acknowledgement of all trajectories"):
            await self._empty.wait()

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        delays = backoff()
        while True:
            await self._wait_for_records()
            self.num_streams += 1
            acknowledged = sum(self.outcomes.values())
            try:
                with translated_errors("orchestrator", "StreamTrajectories"):
                    await self._one_stream()
                log.info("trajectories.stream_ended")
            except RollmillError as error:
                log.warning("trajectories.stream_broke", error=error.message)
                self.account.enter(ActivityName.WAITING_FOR_STREAM, on=ORCHESTRATOR, detail=error.message)
            # Those of the broken stream go to the front of the queue, in their order.
            self._waiting.extendleft(reversed(self._unacknowledged.values()))
            self._unacknowledged.clear()
            if sum(self.outcomes.values()) > acknowledged:
                delays = backoff()
            await asyncio.sleep(next(delays))

    # -- one stream ---------------------------------------------------------------------------------------------

    async def _wait_for_records(self) -> None:
        """Wait for a record; an idle replica needs no stream."""
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
            try:
                await ended(writer)
            finally:
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                writer.result()  # a broken stream breaks the writer, too; the reader has raised the cause

    async def _write(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        number = 0
        while True:
            await self._wait_for_records()
            sent = take_message(self._waiting)
            for record in sent:
                number += 1
                record.record_number = number
                kept = record.trajectory if record.WhichOneof("record") == "trajectory" else record.failure
                if kept.HasField("timing"):  # again, for a record that is sent again
                    kept.timing.sent_at.FromNanoseconds(time.time_ns())
                    kept.timing.num_sends += 1
                # Before the write: a record that was written in part has to be sent again, too.
                self._unacknowledged[number] = record
            self.account.enter(ActivityName.WAITING_FOR_ACKNOWLEDGEMENTS, on=ORCHESTRATOR)
            await call.write(self._message(sent))
            if not self._waiting:  # else the message was full
                await asyncio.sleep(self._linger_s)

    def _message(self, records: Iterable[Record]) -> Request:
        return Request(replica_id=self._replica_id, incarnation=self._incarnation, records=records)

    def _acknowledge(self, ack: pool_pb2.RecordAck) -> None:
        if self._unacknowledged.pop(ack.record_number, None) is None:
            log.warning("trajectories.unknown_ack", record_number=ack.record_number)
            return
        self.account.beat()
        self.outcomes[_OUTCOMES.get(ack.outcome, "?")] += 1
        if ack.outcome in _NOT_TAKEN:  # for good: the record is dropped
            reason = REFUSAL_REASONS.get(ack.reason)
            name = "other" if reason is None else reason.value
            self.refused[name] += 1
            if (suppressed := self._repeats.tell(name)) is not None:
                so_far = self.refused[name]
                log.error(LogEvent.TRAJECTORIES_REFUSED, reason=name, detail=ack.detail, so_far=so_far, **suppressed)
        self._room.release()
        if not self._waiting and not self._unacknowledged:
            self._empty.set()
            self.account.enter(*NOTHING)


def take_message(waiting: deque[Record], most_bytes: int = MESSAGE_BYTES) -> list[Record]:
    """Take the records of the next message: the first, and the following ones that fit into ``most_bytes`` together."""
    taken = [waiting.popleft()]
    size = taken[0].ByteSize()
    while waiting and (size := size + waiting[0].ByteSize()) <= most_bytes:
        taken.append(waiting.popleft())
    return taken
