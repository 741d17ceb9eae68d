"""The queue whose slots are at workers: the gateway's lanes and clients, in front of the streams.

Only a window of jobs is in Redis, enough to keep every worker busy; the others wait here, where clients take turns and
full lanes return a time to retry.
"""

from __future__ import annotations

from services.common.config.processes.envgateway import QueueConfig
from services.envgateway.queue.fair import FairQueue
from services.envgateway.queue.streams.connection import connect
from services.envgateway.queue.streams.names import Names
from services.envgateway.queue.streams.runner import StreamsRunner
from services.envgateway.queue.turns import Turns

_LEAST_WINDOW = 64
_WINDOW_PER_SLOT = 8  # running, ahead of a slot, and on the way there and back


class StreamsQueue(FairQueue):
    """``start`` before the first job, ``close`` at the end."""

    def __init__(self, config: QueueConfig, redis_uri: str) -> None:
        """Raises ``ConfigError`` for a URI that cannot be used."""
        self._window = Turns(num_slots=_LEAST_WINDOW, batch_slots=_LEAST_WINDOW // 2, lane_size=config.lane_size)
        self._slots_of_workers = 0
        self._streams = StreamsRunner(
            connect(redis_uri, config.allow_plain_redis), Names(config.redis_prefix), self._resize
        )
        super().__init__(self._streams, self._window)

    def start(self) -> None:
        self._streams.start()

    async def failed(self) -> None:
        await self._streams.failed()

    async def close(self) -> None:
        await self._streams.close()

    @property
    def gauges(self) -> dict[str, float]:
        return {**super().gauges, **self._streams.gauges}

    @property
    def num_slots(self) -> int:
        return self._slots_of_workers

    def _resize(self, slots: int) -> None:
        self._slots_of_workers = slots
        window = max(_LEAST_WINDOW, _WINDOW_PER_SLOT * slots)
        self._window.resize(window, window - window // 2)
