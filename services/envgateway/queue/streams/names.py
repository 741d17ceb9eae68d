"""Names of keys in Redis: two streams of jobs, one stream of results for each gateway, and live processes.

PREFIX:jobs:interactive, PREFIX:jobs:batch   streams, read by the consumer group ``workers``; an entry is deleted
                                             when its job is answered or withdrawn
PREFIX:results:GATEWAY                       stream, read by that gateway alone; expires
PREFIX:gateway:GATEWAY                       exists while this gateway lives; its loss shows an empty Redis
PREFIX:workers, PREFIX:worker:NAME           set of names, and each worker's facts, which exist while the worker lives
PREFIX:withdrawn                             channel: jobs without a waiting caller
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.common.telemetry.gateway_queue import Lane

GROUP = "workers"
# Fields of an entry of a jobs stream, and of a results stream.
JOB_ID, GATEWAY, PAYLOAD = b"id", b"gateway", b"payload"


@dataclass(frozen=True, slots=True)
class Names:
    """Keys under one prefix.

    >>> Names("rollmill").jobs(Lane.BATCH)
    'rollmill:jobs:batch'
    """

    prefix: str

    def jobs(self, lane: Lane) -> str:
        return f"{self.prefix}:jobs:{lane.value}"

    def results(self, gateway: str) -> str:
        return f"{self.prefix}:results:{gateway}"

    def gateway(self, gateway: str) -> str:
        return f"{self.prefix}:gateway:{gateway}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    @property
    def workers(self) -> str:
        return f"{self.prefix}:workers"

    @property
    def withdrawn(self) -> str:
        return f"{self.prefix}:withdrawn"


def finish(pipe: Any, stream: str, *entries: bytes) -> None:
    """Remove entries of a stream of jobs, and their leases."""
    pipe.xack(stream, GROUP, *entries)
    pipe.xdel(stream, *entries)
