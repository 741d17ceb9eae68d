"""Limits of gRPC in one table (size of messages, rate of calls, number of calls at once), and the count of calls.

A limit is no quota: far above the use of a healthy peer of a large run, a limit keeps a faulty or hostile peer from
using up the process. Sizes are of messages on the wire; rates are of started calls, and apply to each peer and method
separately, like the number at once. Values that a row leaves out are the defaults of ``Limit``; a method without a row
has all defaults.

A call over a rate gets RESOURCE_EXHAUSTED with the name of the limit and the time to wait; a message over a size gets
INVALID_ARGUMENT, because a second attempt does not help. Independent of gRPC.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.common.errors import CapacityError

KIB, MIB = 1 << 10, 1 << 20
# The largest message. Larger ones are slower to move; larger contents are streamed.
MOST_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limits of one method for one peer."""

    request_bytes: int = 64 * KIB
    response_bytes: int = MOST_BYTES
    calls_per_s: float = 200.0
    burst: int = 400  # calls at once, after a pause
    concurrent: int = 64  # calls that run at once
    requests: int | None = None  # of one message, each in a field of the message


DEFAULT = Limit()
_HELLO = Limit(request_bytes=MIB, calls_per_s=50.0, burst=500, concurrent=1024)  # a whole pool that comes back at once
_REPORT = Limit(request_bytes=MIB, calls_per_s=500.0, burst=1000, concurrent=1024)  # each 2 s from each process
_CONTROL = Limit(calls_per_s=20.0, burst=100)  # people and scripts
_READ = Limit(calls_per_s=500.0, burst=1000, concurrent=256)
# A replica plays thousands of rollouts at once, and each may call at the same moment.
_ROLLOUT = Limit(request_bytes=MOST_BYTES, calls_per_s=20_000.0, burst=20_000, concurrent=8192)
# Several of these calls in one message, made in one round of a replica's event loop.
_ROLLOUTS = Limit(request_bytes=MOST_BYTES, calls_per_s=2_000.0, burst=4_000, concurrent=1024, requests=256)

LIMITS: dict[str, Limit] = {
    "JoinPool": _HELLO,
    "ReportReplica": _REPORT,
    # Its messages have the rate of ReportReplica.
    "StreamReports": Limit(request_bytes=MIB, calls_per_s=50.0, burst=500, concurrent=1024),
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
    "ExecuteCode": _ROLLOUT,
    "ExecuteCodes": _ROLLOUTS,
    "Judge": _ROLLOUT,
    "ComputeReward": _ROLLOUT,
    "ComputeRewards": _ROLLOUTS,
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

HANDSHAKE_S = 10.0  # for TLS and HTTP/2's first frames; connections without a call for as long are closed
MOST_CONNECTIONS = 1024  # of one server; more are closed as they come
METADATA_BYTES = 8 * KIB
# A connection's memory is bounded by this times the largest message; calls above it wait at the caller.
STREAMS_PER_CONNECTION = 2048

MOST_BUCKETS = 16_384
RETRY_S = 0.5  # after too many calls at once: when one of them ends is not known

_ROUNDING_S = 1e-9

Key = tuple[str, str]  # peer, method

_SMALL = ("inference", "publisher", "trainer")  # services whose requests are all small


def limit_of(method: str) -> Limit:
    """The limit of ``/package.Service/Method``, or of a method's bare name."""
    return LIMITS.get(method.rpartition("/")[2], DEFAULT)


def server_options(service: str) -> list[tuple[str, Any]]:
    """Limits that gRPC itself enforces, before a message is read."""
    largest = DEFAULT.request_bytes if service in _SMALL else MOST_BYTES
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ]


class Rates:
    """Counts calls by peer and method against limits, in a table of bounded size.

    Every (peer, method) has a token bucket, kept as one number: the time at which it would be full again. The peer with
    the oldest call is dropped first: its bucket would be full anyway.
    """

    def __init__(self, most_buckets: int = MOST_BUCKETS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_buckets = most_buckets
        self._clock = clock
        self._full_at: OrderedDict[Key, float] = OrderedDict()  # the one that was used longest ago comes first
        self._running: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._full_at)

    @property
    def num_running(self) -> int:
        return self._running.total()

    @contextmanager
    def call(self, peer: str, method: str, limit: Limit) -> Iterator[None]:
        """One call, counted for as long as it runs.

        Raises:
            CapacityError: the peer calls this too often, or has too many such calls running; it names the limit.
        """
        key = (peer, method)
        if self._running[key] >= limit.concurrent:
            raise CapacityError(
                f"{method}: {limit.concurrent} calls of this peer run already, as many as may at once",
                retry_after_s=RETRY_S,
                limit=f"{method}.concurrent",
            )
        self.take(key, limit)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def take(self, key: Key, limit: Limit) -> None:
        """Count one call, or one message of a stream; raises CapacityError above the rate."""
        now = self._clock()
        gap = 1.0 / limit.calls_per_s
        full_at = max(self._full_at.pop(key, now), now)
        early_s = full_at + gap - now - limit.burst * gap
        over = early_s > _ROUNDING_S
        self._full_at[key] = full_at if over else full_at + gap
        if len(self._full_at) > self._most_buckets:
            self._full_at.popitem(last=False)
        if over:
            raise CapacityError(
                f"{key[1]}: this peer calls more often than {limit.calls_per_s:g} times a second",
                retry_after_s=early_s,
                limit=f"{key[1]}.calls_per_s",
            )
