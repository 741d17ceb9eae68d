"""Client channels: keepalive, retries where repeating is safe, explicit deadlines.

Deadlines are arguments of each call (``timeout=DEADLINES["GetRun"]``): the reader sees how long it can hang and the
server sees it too. (A timeout in the service config fires early and the server sees none.)
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import grpc

from services.common.rpc.status import translated_errors

__all__ = ["DEADLINES", "KEEPALIVE", "call_metadata", "channel", "translated_errors"]

# Seconds. None: a stream that a lease, a drain or the run's end closes.
DEADLINES: dict[str, float | None] = {
    "JoinPool": None,
    "JoinTraining": None,
    "ReportReplica": 5.0,
    "ReportTrainer": 5.0,
    "StreamTrajectories": None,
    "PullBatch": 60.0,  # to the first message
    "PublishVersion": 10.0,
    "GetManifest": 10.0,
    "FetchWeights": 30.0,  # without a chunk
    "CreateEpisode": 60.0,
    "StepEpisode": 60.0,
    "CloseEpisode": 5.0,
    "ListEnvironments": 5.0,
    "ExecuteCode": 10.0,  # plus the limits of the execution
    "ComputeReward": 60.0,
    "GetStatus": 5.0,
    "GetRun": 5.0,
    "WatchRun": None,
    "PauseRun": 5.0,
    "ResumeRun": 5.0,
    "StopRun": 5.0,
    "DrainReplica": 5.0,
    "StartEvaluation": 5.0,
}

# Repeating these is harmless (docs/protocol.md says why); the others are retried by their callers, or not at all.
_RETRIED: dict[str, tuple[str, ...]] = {
    "millrace.v1.PoolService": ("ReportReplica",),
    "millrace.v1.TrainingService": ("ReportTrainer", "PublishVersion"),
    "millrace.v1.WeightService": ("GetManifest",),
    "millrace.v1.EnvironmentService": ("CreateEpisode", "StepEpisode", "ListEnvironments"),
    "millrace.v1.CodeExecutionService": ("ExecuteCode",),
    "millrace.v1.RewardService": ("ComputeReward",),
    "millrace.v1.StatusService": ("GetStatus",),
    "millrace.v1.RunService": ("GetRun", "PauseRun", "ResumeRun", "StopRun", "DrainReplica", "StartEvaluation"),
}

KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel(address: str) -> grpc.aio.Channel:
    """A channel to a service; it connects on first use and reconnects by itself."""
    options = [
        *KEEPALIVE,
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.enable_retries", 1),
        # A restarted peer is found within a second or two, not after the default of minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def call_metadata(run_id: str = "", request_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata that every call carries; a request id is made when none is given."""
    return (("x-run-id", run_id), ("x-request-id", request_id or uuid.uuid4().hex))


def _service_config() -> str:
    names = [{"service": service, "method": method} for service, methods in _RETRIED.items() for method in methods]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


_SERVICE_CONFIG = _service_config()
