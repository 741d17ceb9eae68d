"""Takes back task groups from replicas that live but never end a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.common.config.processes.services import RolloutConfig
from services.orchestrator.dispatch.retry_limit import RetryLimit
from services.orchestrator.members.pool import ReplicaPool

OVERDUE_GRACE_S = 60.0  # beyond all attempts of a rollout


class OverdueGroups:
    def __init__(
        self,
        pool: ReplicaPool,
        retry_limit: RetryLimit,
        rollout: RolloutConfig,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._retry_limit = retry_limit
        self._limit_s = rollout.timeout_s * (rollout.infra_retries + 1) + OVERDUE_GRACE_S
        self._counters = counters
        self._clock = clock

    def take_back(self) -> None:
        """Issue overdue task groups again; the caller repeats this every second."""
        now = self._clock()
        for replica in self._pool:
            for name in replica.given_before(now - self._limit_s):
                self._counters["task_groups_overdue"] += 1
                self._retry_limit.take_back(name, f"not done after {self._limit_s:g} s")
