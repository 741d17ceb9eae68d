"""Re-issues lost task groups; fails them after the sixth loss; ends evaluations whose version is gone.

Independent of grpc; the caller chooses the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from services.common.records.fates import TOO_OLD, VERSION_GONE, ClosedReason
from services.common.records.masked import REPLICAS_LOST
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.ingest import Ingest
from services.orchestrator.state.groups import TaskGroup

log = structlog.get_logger()

MAX_LOST = 5  # replicas that may be lost under a task group before its open slots are given up


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
