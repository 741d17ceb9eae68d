"""Writes rows of the run's throughput and of the shares of idle time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.telemetry.components import ORCHESTRATOR, is_of_trainer, is_replica
from services.common.telemetry.metrics import ThroughputKey
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.stalls.rules_work import COMPUTING
from services.orchestrator.state.versions import VersionLedger


class ThroughputRows:
    def __init__(
        self,
        *,
        pool: ReplicaPool,
        trained_ledgers: Mapping[str, VersionLedger],
        book: AccountBook,
        metrics: RunMetrics,
        waits: Callable[[], list[str]],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._trained_ledgers = trained_ledgers
        self._book = book
        self._metrics = metrics
        self._waits = waits
        self._clock = clock

    def write(self) -> None:
        step = max((ledger.newest_number for ledger in self._trained_ledgers.values()), default=0)
        values = {
            ThroughputKey.TOKENS_PER_S.value: self._pool.tokens_per_s,
            ThroughputKey.REPLICAS.value: float(len(self._pool)),
            ThroughputKey.RUNNING.value: float(self._pool.num_running),
        }
        self._book.mark(self._clock())
        idle = {
            ThroughputKey.TRAINER_IDLE_SHARE.value: self._book.share_lately(
                is_of_trainer, lambda a: a.name not in COMPUTING
            ),
            ThroughputKey.REPLICA_IDLE_SHARE.value: self._book.share_lately(is_replica, lambda a: a.on == ORCHESTRATOR),
        }
        values |= {name: share for name, share in idle.items() if share is not None}
        self._metrics.throughput(max(step, 0), self._waits(), values)
