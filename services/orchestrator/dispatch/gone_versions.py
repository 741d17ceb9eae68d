"""Fails evaluations on versions that training has left behind and no replica holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.retry_limit import RetryLimit
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.state.versions import VersionLedger

GONE_S = 30.0  # a version that no replica holds for this long cannot be evaluated any more


class GoneVersions:
    def __init__(
        self,
        ledgers: Mapping[str, VersionLedger],
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        evaluations: Evaluations,
        retry_limit: RetryLimit,
        clock: Callable[[], float],
    ) -> None:
        self._ledgers = ledgers
        self._pool = pool
        self._dispatcher = dispatcher
        self._evaluations = evaluations
        self._retry_limit = retry_limit
        self._clock = clock
        self._since: float | None = None

    def check(self) -> None:
        """Fail the rest of each pass whose versions are gone for ``GONE_S``; the caller repeats this every second."""
        if not any(self._gone(versions) for versions in self._evaluations.pinned_versions()):
            self._since = None
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < GONE_S:
            return
        self._retry_limit.abandon_evaluations(self._gone)
        self._since = None

    def _gone(self, versions: Mapping[str, int]) -> bool:
        is_old = any(self._ledgers[policy].newest_number > number for policy, number in versions.items())
        if not is_old or len(self._pool) == 0:
            return False
        return not any(self._dispatcher.may_play(replica.held, versions) for replica in self._pool)
