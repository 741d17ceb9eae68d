"""The training loop's ``Link`` over gRPC: synchronous for the loop's thread, a coroutine on the client's."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from services.common.accounts import Activity, TimeAccount
from services.common.types import Interval, RankBatch, WeightVersion
from services.trainer.loop_thread import LoopThread
from services.trainer.orchestrator_client import OrchestratorClient

_WAITS = ("waiting_for_batch", "replaying", "paused", "finished")


def component_of(policy: str, rank: int) -> str:
    """What a rank of a trainer is called in time accounts."""
    return f"trainer/{policy}" + (f"/rank{rank}" if rank else "")


def rank_account(policy: str, rank: int) -> TimeAccount:
    """The account of the training loop, which runs in the main thread."""
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return TimeAccount(component_of(policy, rank), rest=Activity("starting"), cpu_s=lambda: time.clock_gettime(clock))


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

    def _waits_for(self, state: str) -> str:
        """Whom a trainer in this state waits for. The first rank waits for batches, the others for the first."""
        if state == "publishing":
            return f"publisher/{self._client.policy}"
        if state not in _WAITS:
            return ""
        return "orchestrator" if self._rank == 0 else component_of(self._client.policy, 0)

    def publish(
        self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None:
        with self._account.during("announcing a version", on="orchestrator"):
            self._publish(version, metrics, intervals, finished_at)

    def _publish(
        self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None:
        self._thread.call(self._client.publish(version, metrics, intervals, finished_at))

    def set_state(self, state: str, training_step: int) -> None:
        self._client.report.state, self._client.report.training_step = state, training_step
        activity = "waiting for a batch" if state == "waiting_for_batch" else state
        self._account.enter(activity, on=self._waits_for(state))

    def set_gauge(self, name: str, value: float) -> None:
        self._client.report.gauges = {**self._client.report.gauges, name: value}  # read by the other thread

    def set_checkpoint_steps(self, kept: Sequence[int]) -> None:
        self._client.report.kept_checkpoint_steps = tuple(kept)
        self._client.report.checkpoint_step = max(kept, default=0)

    def take_checkpoint_command(self) -> bool:
        asked, self._client.commands.checkpoint = self._client.commands.checkpoint, False
        return asked

    @property
    def paused(self) -> bool:
        return self._client.commands.paused

    @property
    def stopped(self) -> bool:
        """Raises what the orchestrator refused this trainer with, if it did."""
        if self._client.failure is not None:
            raise self._client.failure
        return self._client.commands.stop or self._client.commands.leave
