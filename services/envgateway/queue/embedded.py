"""The queue inside the gateway's own process: lanes in front of its sandbox."""

from __future__ import annotations

from services.envgateway.queue.base import Executor, Judging, LocalRunner
from services.envgateway.queue.fair import FairQueue
from services.envgateway.queue.turns import Turns
from services.envgateway.sandbox.bare.slot_queue import batch_share


class EmbeddedQueue(FairQueue):
    """One slot is never given to batch, where there are several; ``queue_size`` is that of each lane."""

    def __init__(self, sandbox: Executor, judge: Judging, *, num_slots: int, queue_size: int) -> None:
        turns = Turns(num_slots=num_slots, batch_slots=batch_share(num_slots), lane_size=queue_size, sends_ahead=True)
        super().__init__(LocalRunner(sandbox, judge), turns)
