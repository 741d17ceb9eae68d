"""What nobody plays any more: issued again, but not for ever, and failed where it can never be played.

Knows nothing about grpc or time; who calls it knows when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from services.common.fates import TOO_OLD
from services.common.masked import REPLICAS_LOST
from services.orchestrator.dispatcher import Dispatcher
from services.orchestrator.evaluation import Evaluations
from services.orchestrator.groups import TaskGroup
from services.orchestrator.ingest import Ingest

log = structlog.get_logger()

MAX_LOST = 5  # replicas that may be lost under a task group before its open slots are given up


class GivingUp:
    def __init__(
        self, groups: Mapping[str, TaskGroup], dispatcher: Dispatcher, evaluations: Evaluations, ingest: Ingest
    ) -> None:
        self._groups = groups
        self._dispatcher = dispatcher
        self._evaluations = evaluations
        self._ingest = ingest
        self._cancelled: set[str] = set()  # task groups whose end is on its way to the journal

    def orphaned(self, task_group_ids: list[str]) -> None:
        """Nobody plays these any more: issue their open slots again, but not for ever."""
        self._dispatcher.orphaned(task_group_ids)
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is not None and group.num_lost > MAX_LOST:
                self.give_up(group, REPLICAS_LOST, f"{group.num_lost} replicas were lost while playing it")

    def give_up(self, group: TaskGroup, reason: str, detail: str) -> None:
        """Fail the open slots of a task group."""
        log.warning("task_group.given_up", task_group=group.id, reason=reason, open_slots=len(group.unresolved))
        for index in group.unresolved:
            self._ingest.fail(group, index, reason, detail)

    def cancel_too_old(self, groups: list[TaskGroup]) -> None:
        """End the open slots of training groups whose results could only be dropped; repeating it is harmless."""
        self._cancelled &= self._groups.keys()
        for group in groups:
            if group.id in self._cancelled:
                continue
            self._cancelled.add(group.id)
            log.info("task_group.too_old", task_group=group.id, open_slots=len(group.unresolved))
            self._dispatcher.cancel(group.id, "its open slots are too old to be trained")
            for index in group.unresolved:
                self._ingest.fail(group, index, TOO_OLD, "a rollout that began then could only have been dropped")

    def abandon_evaluations(self, gone: Callable[[Mapping[str, int]], bool]) -> None:
        """Fail what is left of evaluations on versions that nobody holds any more."""
        running = [g for g in self._groups.values() if g.evaluation and gone(g.order.required_versions)]
        unissued = self._evaluations.unissued(gone)
        for group in unissued:
            self._dispatcher.issue_unplayed(group)
        for group in [*running, *unissued]:
            self._dispatcher.cancel(group.id, "its version is gone")
            self.give_up(group, "VERSION_UNAVAILABLE", "no replica holds the version to evaluate any more")
