"""How large messages may be, how often a peer may call, and how many of its calls may run: every limit of gRPC in one table.

A limit is no quota: it lies far above what a healthy peer of a large run does, and keeps one peer that has lost its way, or
means harm, from taking the process from the others. Sizes are of messages as they travel; rates are of calls begun, and
hold for each peer and method apart, as does the number that run at once. What a table row leaves out is ``Limit``'s own
value; a method without a row has all of them.

Who is over a rate is told RESOURCE_EXHAUSTED with the name of the limit and when to come back; who sends too much,
INVALID_ARGUMENT, because sending it again does not help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
# The largest message of anybody. Larger ones are slower to move; what needs more is streamed.
MOST_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one method takes from one peer."""

    request_bytes: int = 64 * KIB
    response_bytes: int = MOST_BYTES
    calls_per_s: float = 200.0
    burst: int = 400  # calls at once, after a pause
    concurrent: int = 64  # calls that run at once


DEFAULT = Limit()
_HELLO = Limit(request_bytes=MIB, calls_per_s=50.0, burst=500, concurrent=1024)  # a whole pool that comes back at once
_REPORT = Limit(request_bytes=MIB, calls_per_s=500.0, burst=1000, concurrent=1024)  # each 2 s from each process
_CONTROL = Limit(calls_per_s=20.0, burst=100)  # people and scripts
_READ = Limit(calls_per_s=500.0, burst=1000, concurrent=256)
# A replica plays thousands of rollouts at once, and each may call at the same moment.
_ROLLOUT = Limit(request_bytes=MOST_BYTES, calls_per_s=20_000.0, burst=20_000, concurrent=8192)

LIMITS: dict[str, Limit] = {
    "JoinPool": _HELLO,
    "ReportReplica": _REPORT,
    # Its messages are held back by acknowledgements, not by a rate.
    "StreamTrajectories": Limit(request_bytes=MOST_BYTES, calls_per_s=50.0, burst=500, concurrent=1024),
    "JoinGateway": Limit(calls_per_s=20.0, burst=200),
    "JoinTraining": _HELLO,
    "ReportTrainer": _REPORT,
    "PullBatch": Limit(calls_per_s=500.0, burst=2000, concurrent=2048),  # every rank asks at the same moment
    "PublishVersion": Limit(request_bytes=MIB, calls_per_s=50.0, burst=200),
    "GetManifest": Limit(calls_per_s=200.0, burst=1000, concurrent=256),
    "FetchWeights": Limit(calls_per_s=500.0, burst=2000, concurrent=256),
    "CreateEpisode": _ROLLOUT,
    "StepEpisode": _ROLLOUT,
    "CloseEpisode": Limit(calls_per_s=20_000.0, burst=20_000, concurrent=8192),
    "ListEnvironments": _READ,
    "ExecuteCode": _ROLLOUT,
    "Judge": _ROLLOUT,
    "JudgeBatch": Limit(request_bytes=MOST_BYTES, calls_per_s=1000.0, burst=2000, concurrent=1024),
    "ComputeReward": _ROLLOUT,
    "GetStatus": _READ,
    "GetRun": _READ,
    "WatchRun": Limit(calls_per_s=20.0, burst=200, concurrent=256),
    "PauseRun": _CONTROL,
    "ResumeRun": _CONTROL,
    "StopRun": _CONTROL,
    "DrainReplica": _CONTROL,
    "StartEvaluation": _CONTROL,
    "Check": _READ,  # health
    "Watch": Limit(calls_per_s=20.0, burst=200, concurrent=256),
    "ServerReflectionInfo": Limit(calls_per_s=20.0, burst=200),
}

HANDSHAKE_S = 10.0  # for TLS and HTTP/2's first frames; who connects and says nothing is hung up on
MOST_CONNECTIONS = 1024  # of one server; more are closed as they come
METADATA_BYTES = 8 * KIB
# A connection's memory is bounded by this times the largest message; calls above it wait at the caller.
STREAMS_PER_CONNECTION = 2048

_SMALL = ("inference", "publisher", "trainer")  # services whose requests are all small


def limit_of(method: str) -> Limit:
    """The limit of ``/package.Service/Method``, or of a method's bare name."""
    return LIMITS.get(method.rpartition("/")[2], DEFAULT)


def server_options(service: str) -> list[tuple[str, Any]]:
    """What gRPC itself enforces, before a byte of a message is looked at."""
    largest = DEFAULT.request_bytes if service in _SMALL else MOST_BYTES
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ]
