"""Implements ``OrchestratorLink`` over gRPC: synchronous calls for the training loop, coroutines in a thread of their own.

gRPC makes progress in that thread while the training thread computes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from services.common.records.device_turn import DeviceTurn
from services.common.records.types import Interval, RankBatch, WeightVersion
from services.common.telemetry.accounts import Activity, TimeAccount
from services.common.telemetry.activities import ActivityName, TrainerState
from services.common.telemetry.components import NOBODY, ORCHESTRATOR, Component, publisher, trainer
from services.trainer.loop.orchestrator_client import OrchestratorClient

log = structlog.get_logger()

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
_WAITS = (TrainerState.WAITING_FOR_BATCH, TrainerState.REPLAYING, TrainerState.PAUSED, TrainerState.FINISHED)


class LoopThread:
    """Runs coroutines for a synchronous thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. The coroutine bounds its own waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Cancel all tasks and close the loop. The process may exit even if a task ignores the cancellation."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("loop.still_running", thread=self._thread.name, after_s=STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


def rank_account(policy: str, rank: int) -> TimeAccount:
    """The time account of the training loop, which runs in the main thread."""
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    rest = Activity(ActivityName.STARTING)
    return TimeAccount(trainer(policy, rank), rest=rest, cpu_s=lambda: time.clock_gettime(clock))


class GrpcLink:
    """One rank's link."""

    def __init__(
        self, client: OrchestratorClient, thread: LoopThread, rank: int, account: TimeAccount | None = None
    ) -> None:
        self._account = account or rank_account("", rank)
        self._client = client
        self._thread = thread
        self._rank = rank

    def pull(self, training_step: int) -> RankBatch | None:
        return self._thread.call(self._client.pull(training_step, self._rank))

    def _waits_for(self, state: TrainerState) -> Component:
        """The component that a trainer in this state waits for: the first rank for batches, the others for the first."""
        if state is TrainerState.PUBLISHING:
            return publisher(self._client.policy)
        if state not in _WAITS:
            return NOBODY
        return ORCHESTRATOR if self._rank == 0 else trainer(self._client.policy)

    def publish(self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval]) -> None:
        with self._account.during(ActivityName.ANNOUNCING, on=ORCHESTRATOR):
            self._thread.call(self._client.publish(version, metrics, intervals))

    def set_state(self, state: TrainerState, training_step: int) -> None:
        self._client.report.state, self._client.report.training_step = state, training_step
        self._account.enter(ActivityName[state.name], on=self._waits_for(state))

    def set_gauge(self, name: str, value: float) -> None:
        self._client.report.gauges = {**self._client.report.gauges, name: value}  # the client's thread reads this

    def set_checkpoint_steps(self, kept: Sequence[int]) -> None:
        self._client.report.kept_checkpoint_steps = tuple(kept)
        self._client.report.checkpoint_step = max(kept, default=0)

    def take_checkpoint_command(self) -> bool:
        if not self._client.commands.checkpoint:
            return False
        self._client.commands.checkpoint = False  # only one that was seen: the client's thread may set another now
        return True

    @property
    def device_turn(self) -> DeviceTurn:
        return self._client.commands.turn

    def set_device_turn(self, number: int) -> None:
        self._client.report.device_turn = number
        self._thread.loop.call_soon_threadsafe(self._client.report_soon)

    def refuse(self, reason: str) -> None:
        self._client.report.refusal = reason
        self._thread.loop.call_soon_threadsafe(self._client.report_soon)

    @property
    def leaving(self) -> bool:
        return self._client.commands.leave

    @property
    def paused(self) -> bool:
        return self._client.commands.paused

    @property
    def stopped(self) -> bool:
        """Whether to leave. Raises the orchestrator's refusal of this trainer, if there is one."""
        if self._client.failure is not None:
            raise self._client.failure
        return self._client.commands.stop or self._client.commands.leave
