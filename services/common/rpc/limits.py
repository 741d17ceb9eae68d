"""Limits of messages and connections of gRPC. Independent of gRPC.

A limit is far above the use of a healthy peer of a large run. A message over its size gets INVALID_ARGUMENT, because a
second attempt does not help. Calls are not counted by peer: callers without keys of the run are refused before a message
is read, and without keys a server listens on loopback only.
"""

from __future__ import annotations

from typing import Any

KIB, MIB = 1 << 10, 1 << 20
MOST_BYTES = 4 * MIB  # the largest message; larger ones are slower to move, and larger contents are streamed
SMALL_BYTES = 64 * KIB  # the largest request of a method without an entry

REQUEST_BYTES: dict[str, int] = {
    "JoinPool": MIB,
    "StreamReports": MIB,
    "StreamTrajectories": MOST_BYTES,
    "JoinTraining": MIB,
    "ReportTrainer": MIB,
    "PublishVersion": MIB,
    "CreateEpisode": MOST_BYTES,
    "StepEpisode": MOST_BYTES,
    "ExecuteCode": MOST_BYTES,
    "ExecuteCodes": MOST_BYTES,
    "Judge": MOST_BYTES,
    "ComputeReward": MOST_BYTES,
    "ComputeRewards": MOST_BYTES,
}
MOST_REQUESTS = 256  # in one message of ExecuteCodes and ComputeRewards

HANDSHAKE_S = 10.0  # for TLS and HTTP/2's first frames; connections without a call for as long are closed
MOST_CONNECTIONS = 1024  # of one server; more are closed as they come
METADATA_BYTES = 8 * KIB
# A connection's memory is bounded by this times the largest message; calls above it wait at the caller.
STREAMS_PER_CONNECTION = 2048

_SMALL = ("inference", "publisher", "trainer")  # services whose requests are all small


def server_options(service: str) -> list[tuple[str, Any]]:
    """Limits that gRPC itself enforces, before a message is read."""
    return [
        ("grpc.max_receive_message_length", SMALL_BYTES if service in _SMALL else MOST_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ]
