"""Task groups: slots, outcomes and owners, and the names of their sequences.

Invariants: the first outcome of a slot wins. A group is complete when every slot has an outcome, trajectory or final
failure. Independent of replicas, buffers and the journal.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.common.records import Purpose, RolloutFailure, TaskGroupOrder, TokenSequence, Trajectory

Outcome = Trajectory | RolloutFailure
Incarnation = tuple[str, str]  # replica id and incarnation: one process of a replica
GroupBy = Literal["attempt", "rollout", "policy"]


@dataclass(slots=True)
class TaskGroup:
    """One issue of one task: a slot per trajectory, and the replica that runs the group."""

    order: TaskGroupOrder  # with every slot, including resolved ones
    position: int = -1  # in the curriculum, or in the evaluation data
    evaluation: str = ""  # the evaluation pass of this group
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    born: dict[str, int] = field(default_factory=dict)  # policy -> version on which the open slots began
    num_lost: int = 0  # replicas that lost the group: silent, replaced, ended, or overdue with it
    owners: set[Incarnation] = field(
        default_factory=set
    )  # replicas that were ever given the group: each may send a slot's record
    lacks_owner: bool = False  # the record of its replica is lost: every replica may send its records

    @property
    def id(self) -> str:
        return self.order.task_group_id

    @property
    def is_training(self) -> bool:
        return self.order.purpose is Purpose.TRAIN

    @property
    def unresolved(self) -> tuple[int, ...]:
        return tuple(index for index in self.order.indices if index not in self.outcomes)

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == len(self.order.indices)

    def resolve(self, outcome: Outcome) -> bool:
        """Keep the outcome unless its slot has one; True for the first."""
        if not 0 <= outcome.index < len(self.order.indices):
            raise ValueError(f"task group {self.id} has no slot {outcome.index}")
        if outcome.index in self.outcomes:
            return False
        self.outcomes[outcome.index] = outcome
        return True

    @property
    def trajectories(self) -> list[Trajectory]:
        """The outcomes in slot order."""
        return [t for _, t in sorted(self.outcomes.items()) if isinstance(t, Trajectory)]


def sequence_id(task_group_id: str, index: int, position: int) -> str:
    return f"{task_group_id}/{index}/{position}"


def split_sequence_id(name: str) -> tuple[str, int, int]:
    """The inverse of ``sequence_id``: task group, slot, position in the trajectory."""
    group, index, position = name.rsplit("/", 2)
    return group, int(index), int(position)


def group_key(sequence: TokenSequence, group_by: GroupBy) -> tuple[str, str, int]:
    """(policy, role, attempt) of the advantage group that a sequence belongs to."""
    if group_by == "attempt":
        return sequence.policy, sequence.role, sequence.attempt
    return sequence.policy, "", 0


# --- State of the run, pause and stop. Independent of the parts that act on them.


class RunState(enum.StrEnum):
    STARTING = "starting"  # waiting for the first weights and replicas
    EVALUATING_START = "evaluating_start"
    TRAINING = "training"
    PAUSED = "paused"
    EVALUATING_END = "evaluating_end"
    FINISHED = "finished"  # all steps are done
    STOPPED = "stopped"  # ended before the last step


class RunControl:
    """``phase`` is the progress of the run; a pause hides the phase in ``state`` and keeps the phase."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.phase = RunState.STARTING
        self.paused = False
        self.stop_reason = ""
        self.stop_requested = asyncio.Event()

    @property
    def state(self) -> RunState:
        return RunState.PAUSED if self.paused and not self.ended else self.phase

    @property
    def ended(self) -> bool:
        return self.phase in (RunState.FINISHED, RunState.STOPPED)

    def enter(self, phase: RunState) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._on_change()

    def pause(self) -> bool:
        """False for a run that is paused already, or has ended."""
        return self._set_paused(True)

    def resume(self) -> bool:
        return self._set_paused(False)

    def _set_paused(self, paused: bool) -> bool:
        if self.paused is paused or self.ended:
            return False
        self.paused = paused
        self._on_change()
        return True

    def stop(self, reason: str) -> None:
        if not self.ended and not self.stop_requested.is_set():
            self.stop_reason = reason
            self.stop_requested.set()
