"""Client channels: keepalive, retries where repeating is safe, ids in the metadata, explicit deadlines.

Deadlines are arguments of each call (``timeout=DEADLINES["GetRun"]``): the reader sees how long it can hang and the
server sees it too. (A timeout in the service config fires early and the server sees none.)
"""

from __future__ import annotations

import json
from typing import Any

import grpc

from services.common.rpc.metadata import call_metadata, completed
from services.common.rpc.status import translated_errors

__all__ = ["DEADLINES", "KEEPALIVE", "RETRIED", "call_metadata", "channel", "translated_errors"]

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
    "Judge": 60.0,  # plus the limits of its cases
    "JudgeBatch": None,
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

# Repeating these is harmless, so the channel waits for the peer (up to the call's deadline) and retries UNAVAILABLE.
# The others are retried by their callers, who know what was done already, or not at all.
RETRIED: dict[str, tuple[str, ...]] = {
    "millrace.v1.PoolService": ("ReportReplica",),
    "millrace.v1.TrainingService": ("ReportTrainer", "PublishVersion"),
    "millrace.v1.WeightService": ("GetManifest",),
    "millrace.v1.EnvironmentService": ("CreateEpisode", "StepEpisode", "ListEnvironments"),
    "millrace.v1.CodeExecutionService": ("ExecuteCode",),
    "millrace.v1.JudgeService": ("Judge",),
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
    return _Channel(grpc.aio.insecure_channel(address, options=options))


class _Channel(grpc.aio.Channel):
    """Puts the caller's ids on every call; all else is the wrapped channel's.

    Not client interceptors: grpc.aio gives each intercepted call a task and a queue of its own.
    """

    def __init__(self, wrapped: grpc.aio.Channel) -> None:
        self._wrapped = wrapped

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._wrapped.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._wrapped.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._wrapped.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._wrapped.channel_ready()

    def unary_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return _with_ids(self._wrapped.unary_unary(*arguments, **keywords))

    def unary_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return _with_ids(self._wrapped.unary_stream(*arguments, **keywords))

    def stream_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return _with_ids(self._wrapped.stream_unary(*arguments, **keywords))

    def stream_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return _with_ids(self._wrapped.stream_stream(*arguments, **keywords))


def _with_ids(call: Any) -> Any:
    def called(*arguments: Any, metadata: Any = None, **keywords: Any) -> Any:
        return call(*arguments, metadata=completed(metadata), **keywords)

    return called


def _service_config() -> str:
    names = [{"service": service, "method": method} for service, methods in RETRIED.items() for method in methods]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "waitForReady": True, "retryPolicy": policy}]})


_SERVICE_CONFIG = _service_config()
