"""The lanes and gauges of the environment gateway's queue, which the gateway reports and the stall detector reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Lane(enum.StrEnum):
    """Priority of a job in the gateway's queue."""

    INTERACTIVE = "interactive"  # a rollout waits for the answer
    BATCH = "batch"  # the answer grades a whole rollout


class QueueGauge(enum.StrEnum):
    REDIS_CONNECTED = "queue_redis_connected"
    WORKERS = "queue_workers"
    UNANSWERED = "queue_unanswered"  # jobs sent to workers


def waiting_gauge(lane: Lane) -> str:
    """The gauge of the jobs that wait in a lane."""
    return f"queue_{lane}_waiting"


def num_waiting(gauges: Mapping[str, float]) -> float:
    """Jobs that wait for a slot, in all lanes."""
    return sum(gauges.get(waiting_gauge(lane), 0.0) for lane in Lane)
