"""Re-issues lost and overdue task groups; fails them after the sixth loss; ends evaluations whose version is gone.

Independent of grpc; the caller chooses the moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from services.common.config.processes.services import RolloutConfig
from services.common.records.fates import TOO_OLD, VERSION_GONE, ClosedReason, RunCount
from services.common.records.masked import REPLICAS_LOST
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.ingest import Ingest
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.state.groups import TaskGroup
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()

MAX_LOST = 5  # replicas that may be lost under a task group before its open slots are given up
OVERDUE_GRACE_S = 60.0  # beyond all attempts of a rollout
GONE_S = 30.0  # a version that no replica holds for this long cannot be evaluated any more


class RetryLimit:
    def __init__(
        self, groups: Mapping[str, TaskGroup], dispatcher: Dispatcher, evaluations: Evaluations, ingest: Ingest
    ) -> None:
        self._groups = groups
        self._dispatcher = dispatcher
        self._evaluations = evaluations
        self._ingest = ingest
        self._cancelled: set[str] = set()  # task groups whose cancellation is on its way to the journal

    def orphaned(self, task_group_ids: list[str]) -> None:
        """Issue the open slots of these task groups again, or fail them after too many lost replicas."""
        self._dispatcher.orphaned(task_group_ids)
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is not None and group.num_lost > MAX_LOST:
                self.give_up(group, REPLICAS_LOST, f"{group.num_lost} replicas were lost while they ran the task group")

    def take_back(self, task_group_id: str, reason: str) -> None:
        """Cancel a task group on its replica, then issue its open slots again as ``orphaned`` does."""
        self._dispatcher.cancel(task_group_id, reason)
        self.orphaned([task_group_id])

    def give_up(self, group: TaskGroup, reason: str, detail: str) -> None:
        """Fail the open slots of a task group."""
        log.warning(LogEvent.TASK_GROUP_GIVEN_UP, task_group=group.id, reason=reason, open_slots=len(group.unresolved))
        for index in group.unresolved:
            self._ingest.fail(group, index, reason, detail)

    def cancel_too_old(self, groups: list[TaskGroup]) -> None:
        """Cancel training groups whose results could only be dropped, and fail their open slots; repetition has no
        effect."""
        self._cancelled = {name for name in self._cancelled if name in self._groups}
        for group in groups:
            if group.id in self._cancelled:
                continue
            self._cancelled.add(group.id)
            log.info("task_group.too_old", task_group=group.id, open_slots=len(group.unresolved))
            self._dispatcher.cancel(group.id, "its open slots are too old to be trained")
            for index in group.unresolved:
                self._ingest.fail(group, index, TOO_OLD, "a rollout that began then could only have been dropped")

    def abandon_evaluations(self, gone: Callable[[Mapping[str, int]], bool]) -> None:
        """Fail the open slots of evaluations on versions that no replica holds any more."""
        running = [g for g in self._groups.values() if g.evaluation and gone(g.order.required_versions)]
        unissued = self._evaluations.unissued(gone)
        for group in unissued:
            self._dispatcher.issue_unplayed(group)
        for group in [*running, *unissued]:
            self._dispatcher.cancel(group.id, ClosedReason.VERSION_GONE)
            self.give_up(group, VERSION_GONE, ClosedReason.VERSION_GONE)


class OverdueGroups:
    """Takes back task groups from replicas that live but never end a rollout."""

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
                self._counters[RunCount.TASK_GROUPS_OVERDUE.value] += 1
                self._retry_limit.take_back(name, f"not done after {self._limit_s:g} s")


class GoneVersions:
    """Ends evaluations on versions that training has left behind and no replica holds."""

    def __init__(
        self,
        ledgers: Mapping[str, VersionLedger],
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        evaluations: Evaluations,
        abandon: Callable[[Callable[[Mapping[str, int]], bool]], None],
        clock: Callable[[], float],
    ) -> None:
        self._ledgers = ledgers
        self._pool = pool
        self._dispatcher = dispatcher
        self._evaluations = evaluations
        self._abandon = abandon
        self._clock = clock
        self._since: float | None = None

    def check(self) -> None:
        """End each pass whose versions are gone for ``GONE_S``; the caller repeats this every second."""
        if not any(self._gone(versions) for versions in self._evaluations.pinned_versions()):
            self._since = None
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < GONE_S:
            return
        self._abandon(self._gone)
        self._since = None

    def _gone(self, versions: Mapping[str, int]) -> bool:
        is_old = any(self._ledgers[policy].newest_number > number for policy, number in versions.items())
        if not is_old or len(self._pool) == 0:
            return False
        return not any(self._dispatcher.may_play(replica.held, versions) for replica in self._pool)
