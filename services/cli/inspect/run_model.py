"""What the journal of a run says of its task groups, read in one pass: the model under all viewers.

    issue -> assignments -> slots -> verdict -> batches -> versions -> closed

``read`` takes the records that were written since the last call, so that a page follows a run in progress. Trajectories are
not loaded: the model has the place of each, and its reader loads one when its content is asked for. Reads only; also reads a
journal that is being written, or of an orchestrator that was killed.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.errors import ConfigError
from services.common.records import Purpose, RolloutPhase
from services.common.telemetry.metrics import TrainerKey
from services.orchestrator.groups import RunState, split_sequence_id
from services.orchestrator.journal import entries as records
from services.orchestrator.journal.entries import GroupVerdict
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row

Json = dict[str, Any]

OTHER_SHAPE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""Errors of a record that is JSON, but not of this version."""

_LOADED = frozenset(
    {
        records.GROUP, records.ASSIGNMENT, records.FAILURE, records.VERDICT, records.BATCH, records.VERSION, records.CLOSED,
    }
)  # fmt: skip
_OF_RUN = frozenset({records.BATCH, records.VERSION, records.EVALUATION, records.STATE})
NOT_RECORDED = "not recorded"
"""The reason of a failure whose record cannot be read."""


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


@dataclass(slots=True, kw_only=True)
class SlotFacts:
    """One resolved slot. The model knows when it was durable, and its failure; a viewer loads the rest of its record.

    Times of a replica are on the replica's clock; 0 is unknown.
    """

    index: int
    durable_at: float
    row: Row | None = None  # the record that resolved it
    failure: str = ""  # its reason
    detail: str = ""
    reward: float | None = None  # None: a failure
    replica_id: str = ""
    accepted_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    sent_at: float = 0.0
    num_sends: int = 0
    num_retries: int = 0
    phases: tuple[RolloutPhase, ...] = ()
    sequences: tuple[SequenceFacts, ...] = ()
    readable: bool = True  # its record is still there


@dataclass(slots=True, kw_only=True)
class Used:
    """Sequences of the task group in the batch of one training step."""

    policy: str
    training_step: int
    assembled_at: float
    batch_size: int  # sequences
    num_sequences: int = 0  # of the task group
    minibatches: tuple[int, ...] = ()
    staleness_max: int = 0
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


class Entry(NamedTuple):
    """One sequence of a task group in a batch."""

    slot: int
    position: int  # in the trajectory
    use: Used
    num_masked_tokens: int
    replayed: bool


@dataclass(slots=True, kw_only=True)
class GroupFacts:
    """One task group. Times are seconds since the epoch, and 0 where unknown.

    All but the name may be missing: a run that was killed, a silent replica, a journal whose trajectories were collected.
    """

    task_group_id: str
    task_id: str = ""
    purpose: str = "train"
    evaluation: str = ""
    num_slots: int = 0  # 0: the record of its issue cannot be read
    policies: tuple[str, ...] = ()  # empty: all of the run
    assignments: tuple[Assignment, ...] = ()
    slots: dict[int, SlotFacts] = field(default_factory=dict)  # resolved ones, by index
    verdicts: tuple[GroupVerdict, ...] = ()
    judged_at: float = 0.0
    uses: tuple[Used, ...] = ()
    closed_at: float = 0.0
    closed_reason: str = ""
    evaluated_at: float = 0.0  # its evaluation was finished
    notes: tuple[Note, ...] = ()
    clocks: dict[str, float] = field(default_factory=dict)  # replica -> seconds that its times were moved by
    # Of the model alone:
    steps: dict[str, int] = field(default_factory=dict)  # policy -> training step in which the group was issued
    entries: list[Entry] = field(default_factory=list)

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
        return sum(1 for slot in self.slots.values() if slot.failure)


def open_journal(run_dir: Path) -> JournalReader:
    """Raises ``ConfigError`` when the directory has no journal."""
    directory = run_files.journal(run_dir)
    if not directory.is_dir():
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no journal yet: its orchestrator has not begun")
    return JournalReader(directory)


class RunModel:
    """``read``, then the attributes. One thread reads; others may look at the attributes, and ``load``."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ``ConfigError`` when the directory has no journal."""
        self.reader = open_journal(run_dir)
        self.lock = threading.RLock()
        """Of the reader, which serves one thread at a time."""
        self.groups: dict[str, GroupFacts] = {}  # in order of issue
        self.newest: dict[str, int] = {}  # policy -> newest published version
        self.last = 0
        """The number of the last record that was read."""
        self.changed: set[str] = set()
        """Task groups with new records; whoever follows the model clears it."""
        self.num_unreadable = 0  # damaged records, or of another version
        self.num_repeated = 0  # training records of a slot that had one
        self.num_positions = 0  # of the curriculum, that were drawn
        self.num_fresh: Counter[str] = Counter()  # fresh sequences that batch records name, by policy
        self.batch_tokens: dict[tuple[str, int], int] = {}  # (policy, step) -> trained ones, as the trainer counts them
        self.updates_skipped: Counter[str] = Counter()  # optimizer updates, by policy
        self._uses: dict[tuple[str, int], list[Used]] = defaultdict(list)  # whose version is not published
        self._evaluated: dict[str, float] = {}  # evaluation -> its end
        self._of_evaluation: dict[str, list[GroupFacts]] = defaultdict(list)
        self._state: Row | None = None

    def close(self) -> None:
        self.reader.close()

    def read(self, only: str = "") -> None:
        """Take the new records; with ``only``, those that concern one task group."""
        for row in self.new_rows():
            if not only or row.kind in _OF_RUN or only in (row.key, row.key.rpartition("/")[0]):
                self.take(row)

    def new_rows(self) -> Iterator[Row]:
        """Rows after the last one that was taken."""
        return self.reader.select("r.number > ?", (self.last,))

    def take(self, row: Row) -> Json | None:
        """Take one record; returns its content. None for a trajectory, for one that cannot be read, and for a kind that the
        model does not load."""
        self.last = row.number
        record = None
        try:
            if row.kind in _LOADED:
                record = self.load(row)
                self.num_unreadable += record is None
            if row.kind == records.GROUP:
                self._issued(row, record)
            elif row.kind in (records.TRAJECTORY, records.FAILURE):
                self._resolved(row, record)
            elif row.kind == records.VERSION:
                self._published(row, record)
            elif row.kind == records.BATCH and record is not None:
                self._batch(row, record)
            elif row.kind == records.EVALUATION:
                self._evaluated[row.key] = row.written_at
                for group in self._of_evaluation[row.key]:
                    group.evaluated_at = row.written_at
            elif row.kind == records.STATE:
                self._state = row
            elif (group_of_row := self.groups.get(row.key)) is not None:
                self._told(group_of_row, row, record)
        except OTHER_SHAPE:
            self.num_unreadable += 1
            return None
        return record

    def load(self, row: Row) -> Json | None:
        """The content of a record; None where it cannot be read."""
        with self.lock:
            return self.reader.load(row)

    @property
    def is_finished(self) -> bool:
        """Whether the run is done, by its last recorded state."""
        record = self.load(self._state) if self._state is not None else None
        return record is not None and record["phase"] == RunState.FINISHED

    def _issued(self, row: Row, record: Json | None) -> None:
        group = self.groups.setdefault(row.key, GroupFacts(task_group_id=row.key))
        group.assignments = (Assignment(at=row.written_at, replica_id=record["replica_id"] if record else ""),)
        if record is None:
            return
        group.task_id, group.purpose = record["task_id"], record["purpose"]
        group.evaluation, group.policies = record["evaluation"], tuple(record["policies"])
        group.num_slots = len(record["indices"])
        if group.evaluation:
            self._of_evaluation[group.evaluation].append(group)
            group.evaluated_at = self._evaluated.get(group.evaluation, 0.0)
        if group.purpose == Purpose.TRAIN:
            self.num_positions = max(self.num_positions, record["position"] + 1)
            policies = group.policies or tuple(one["policy"] for one in record["born"]) or tuple(self.newest)
            group.steps = {policy: max(0, self.newest.get(policy, 0)) + 1 for policy in policies}

    def _resolved(self, row: Row, record: Json | None) -> None:
        name, _, index = row.key.rpartition("/")
        group = self.groups.get(name)
        if group is None:
            return
        slot = int(index)
        if slot in group.slots:  # the first record of a slot counts
            self.num_repeated += group.purpose == Purpose.TRAIN
            return
        found = group.slots[slot] = SlotFacts(index=slot, durable_at=row.written_at, row=row)
        if row.kind == records.FAILURE:
            found.failure = NOT_RECORDED if record is None else record["reason"]
        self.changed.add(name)

    def _told(self, group: GroupFacts, row: Row, record: Json | None) -> None:
        """Take an assignment, a verdict or the end of a task group."""
        if row.kind == records.ASSIGNMENT:
            replica = "" if record is None else record["replica_id"]
            group.assignments += (Assignment(at=row.written_at, replica_id=replica),)
        elif row.kind == records.VERDICT and record is not None:
            group.verdicts = records.from_json(records.Verdicts, record).advantage_groups
            group.judged_at = row.written_at
        elif row.kind == records.CLOSED:
            group.closed_at = row.written_at
            group.closed_reason = "" if record is None else record["reason"]
        self.changed.add(row.key)

    def _batch(self, row: Row, record: Json) -> None:
        policy, step, sequences = str(record["policy"]), int(record["training_step"]), record["sequences"]
        if not any(entry["replayed"] for entry in sequences):
            # Lengths of sequences that are trained again are dropped by then.
            self.batch_tokens[policy, step] = sum(totals["num_trained_tokens"] for totals in record["minibatches"])
        uses: dict[str, Used] = {}
        for entry in sequences:
            name, slot, position = split_sequence_id(entry["sequence_id"])
            self.num_fresh[policy] += not entry["replayed"]
            if (group := self.groups.get(name)) is None:
                continue
            if name not in uses:
                uses[name] = Used(
                    policy=policy, training_step=step, assembled_at=row.written_at, batch_size=len(sequences)
                )
                group.uses += (uses[name],)
                self.changed.add(name)
            use = uses[name]
            use.num_sequences += 1
            use.minibatches = tuple(sorted({*use.minibatches, entry["minibatch"]}))
            use.staleness_max = max(use.staleness_max, entry["staleness"])
            use.replayed |= entry["replayed"]
            group.entries.append(Entry(slot, position, use, entry["num_masked_tokens"], entry["replayed"]))
        self._uses[policy, step] += uses.values()

    def _published(self, row: Row, record: Json | None) -> None:
        policy, _, number = row.key.rpartition("/")
        is_new = int(number) > self.newest.get(policy, -1)  # else offered again, after its record was damaged
        self.newest[policy] = max(int(number), self.newest.get(policy, -1))
        if record is None:
            return
        published = records.from_json(records.VersionRecord, record)
        metrics = published.metrics
        if is_new:
            self.updates_skipped[policy] += round(metrics.get(TrainerKey.UPDATES_SKIPPED, 0.0))
        for use in self._uses.pop((policy, int(number)), ()):
            use.published_at = row.written_at
            use.compute = published.compute
            use.loss, use.grad_norm = metrics.get(TrainerKey.LOSS), metrics.get(TrainerKey.GRAD_NORM)
