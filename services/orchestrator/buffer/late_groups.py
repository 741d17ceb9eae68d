"""Decides about groups that only a policy's next batch can train, and that still run.

    keep, mask   no action: their members are trained on arrival, old tokens masked with `mask`
    wait         the batch waits for them, once and for a share of the duration of the previous step
    drop         their open slots are cancelled, so that their finished members get into this batch

The caller asks when the buffer has a full batch. Independent of the journal, replicas and the assembly of batches.
"""

from __future__ import annotations

from collections.abc import Callable

from services.common.config.training.policy import BatchConfig
from services.orchestrator.buffer.pipeline import ExperiencePipeline
from services.orchestrator.state.groups import TaskGroup

WAIT_SHARE = 0.25  # of the time that the training step before took, where the recipe does not say


class LateGroups:
    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        cancel: Callable[[list[TaskGroup]], None],
        clock: Callable[[], float],
    ) -> None:
        """``cancel`` ends the open slots of groups; the calls repeat until the groups are finished."""
        self._policy = policy
        self._late = config.late
        self._wait_share = config.late_wait_share or WAIT_SHARE
        self._experience = experience
        self._cancel = cancel
        self._clock = clock
        self._waited: set[str] = set()  # task groups that a batch has waited for
        self._began: float | None = None  # when the wait began that is going on
        self.step_s: float | None = None  # how long the newest training step took
        self.num_waited_for = 0  # task groups that the next batch waits for

    def settled(self) -> bool:
        """Whether unfinished groups allow the batch to be assembled now."""
        if self._late == "drop":
            return self._all_cancelled()
        return self._late != "wait" or self._all_here()

    def left_s(self) -> float | None:
        """Remaining seconds of the present wait; None without one."""
        if self._began is None or self.step_s is None:
            return None
        return max(0.0, self._began + self._wait_share * self.step_s - self._clock())

    def taken(self) -> float:
        """Record that the batch was assembled; returns the seconds of its wait for these groups."""
        waited_s = 0.0 if self._began is None else self._clock() - self._began
        if self._late == "wait":
            due = {group.id for group in self._experience.due(self._policy)}
            self._waited = due if self._began is not None else self._waited & due
        self._began = None
        self.num_waited_for = 0
        return waited_s

    def _all_cancelled(self) -> bool:
        # A group that another policy can still train continues; its members of this policy become too old.
        due = [g for g in self._experience.due(self._policy) if self._experience.is_due_everywhere(g)]
        if due:
            self._cancel(due)
        return not due

    def _all_here(self) -> bool:
        due = [g for g in self._experience.due(self._policy) if g.id not in self._waited]
        self.num_waited_for = len(due)
        if not due or self.step_s is None:
            return True
        if self._began is None:
            self._began = self._clock()
        left_s = self.left_s()
        return left_s is not None and left_s <= 0.0
