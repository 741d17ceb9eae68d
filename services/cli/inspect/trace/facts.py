"""Facts about one task group. Plain records; times are seconds since the epoch.

All but the task group's name may be missing: a run that was killed, a silent replica, a journal whose
trajectories were collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.records.types import RolloutPhase
from services.orchestrator.journal.records import GroupVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Open slots were given to a replica. The first one is the issue of the task group."""

    at: float
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFacts:
    policy: str
    role: str
    attempt: int
    reward: float
    num_tokens: int
    num_trained_tokens: int
    versions: tuple[int, ...]  # that computed its trained tokens, in order of appearance
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFacts:
    """One resolved slot. Times of a replica are on the replica's clock; 0 is unknown."""

    index: int
    replica_id: str
    durable_at: float
    accepted_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    sent_at: float = 0.0
    num_sends: int = 0
    num_retries: int = 0
    phases: tuple[RolloutPhase, ...] = ()
    reward: float | None = None  # None: a failure
    failure: str = ""
    detail: str = ""
    sequences: tuple[SequenceFacts, ...] = ()
    readable: bool = True  # its record is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Sequences of the task group in the batch of one training step."""

    policy: str
    training_step: int
    assembled_at: float
    num_sequences: int  # of the task group
    batch_size: int  # sequences
    minibatches: tuple[int, ...]
    staleness_max: int
    replayed: bool = False  # an earlier batch had them, too
    pulls: tuple[tuple[int, float], ...] = ()  # rank, when
    compute: tuple[tuple[float, float], ...] = ()  # stretches, on the trainer's clock
    loss: float | None = None
    grad_norm: float | None = None
    published_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of a log that concerns the task group."""

    at: float
    service: str
    event: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    task_group_id: str
    task_id: str = ""
    purpose: str = "train"
    evaluation: str = ""
    num_slots: int = 0
    policies: tuple[str, ...] = ()  # empty: all of the run
    assignments: tuple[Assignment, ...] = ()
    slots: tuple[SlotFacts, ...] = ()  # resolved ones, by index
    verdicts: tuple[GroupVerdict, ...] = ()
    judged_at: float = 0.0
    uses: tuple[Used, ...] = ()
    closed_at: float = 0.0
    closed_reason: str = ""
    evaluated_at: float = 0.0  # its evaluation was finished
    notes: tuple[Note, ...] = ()
    clocks: dict[str, float] = field(default_factory=dict)  # replica -> seconds that its times were moved by

    @property
    def all_known(self) -> bool:
        """Every slot's record is there, or was."""
        return self.num_slots > 0 and len(self.slots) == self.num_slots

    @property
    def complete(self) -> bool:
        """Every slot was resolved, also where the journal's retention has collected the records since."""
        return self.all_known or bool(self.verdicts)

    @property
    def num_failed(self) -> int:
        return sum(1 for slot in self.slots if slot.failure)
