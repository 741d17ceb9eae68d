"""Sends the reports of a replica over one stream, and opens another stream after a failure.

Each report waits for its answer, so at most one is on its way. A stream instead of calls: a call costs the orchestrator
about twice as much as a message of a stream, and of a large pool reports are the largest cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import grpc

from services.common import codec
from services.common.aio import deadline
from services.common.errors import InfrastructureError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.records.types import WeightTransfer, WeightVersion
from services.common.rpc.client.channel import REPORT_ANSWER_S, translated_errors
from services.common.telemetry.accounts import AccountState, PeerState
from services.common.wire import interval_to_proto, write

Call = grpc.aio.StreamStreamCall[pool_pb2.StreamReportsRequest, pool_pb2.StreamReportsResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """Identity of the joining replica. ``incarnation`` is new for every start of the process."""

    replica_id: str
    incarnation: str
    num_slots: int
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""  # where the replica relays weights; empty: no relay


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Versions, load and health of a replica."""

    held_versions: tuple[WeightVersion, ...]
    running_task_group_ids: tuple[str, ...]
    num_generated_tokens: int
    emission_intervals: tuple[tuple[float, float], ...]  # since the last report
    gauges: Mapping[str, float]
    weight_transfers: tuple[WeightTransfer, ...] = ()  # since the last report
    accounts: tuple[AccountState, ...] = ()
    peers: tuple[PeerState, ...] = ()
    device_turn: int = 0  # that it has carried out last


codec.RENAMED[ReplicaReport] = {"emission_intervals": ""}  # pairs of numbers


def report_to_proto(
    identity: ReplicaIdentity,
    report: ReplicaReport,
    intervals: Iterable[tuple[float, float]],
    transfers: Iterable[WeightTransfer],
) -> pool_pb2.StreamReportsRequest:
    """``intervals`` and ``transfers``: those since the last answered report, instead of the report's own."""
    proto = pool_pb2.StreamReportsRequest(
        replica_id=identity.replica_id,
        incarnation=identity.incarnation,
        emission_intervals=[interval_to_proto(interval) for interval in intervals],
    )
    return write(replace(report, weight_transfers=tuple(transfers)), proto)


class ReportStream:
    def __init__(self, stub: pool_pb2_grpc.PoolServiceAsyncStub) -> None:
        self._stub = stub
        self._call: Call | None = None  # without an unanswered report

    async def send(self, report: pool_pb2.StreamReportsRequest) -> pool_pb2.StreamReportsResponse:
        """The answer to a report.

        Raises:
            RollmillError: the orchestrator's refusal, such as ``LeaseLostError``; ``InfrastructureError`` for a broken
                stream; ``DeadlineError`` without an answer in time.
        """
        call, self._call = self._call, None
        if call is None or call.done():  # broken or ended since the last answer
            call = self._stub.StreamReports(wait_for_ready=True)
        try:
            with translated_errors("orchestrator", "StreamReports"):
                async with deadline(REPORT_ANSWER_S, "the orchestrator's answer to a report"):
                    await call.write(report)
                    response = await call.read()
            if not isinstance(response, pool_pb2.StreamReportsResponse):
                raise InfrastructureError("the orchestrator has ended the stream of reports")
        except BaseException:
            call.cancel()
            raise
        self._call = call
        return response

    def close(self) -> None:
        """End the stream."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
