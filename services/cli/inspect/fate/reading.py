"""Reads the fate of everything that a run has issued, from its journal in one pass.

    issue -> slots resolved -> verdict -> batch -> closed: folded into the sums

The rows of the journal's index are in the order of events. A task group is kept in memory from its issue until nothing
more follows, so memory holds the groups in flight, the sums by policy and step, and 13 bytes for each sequence (its
length). Trajectories are read only for task groups without a verdict: those that were incomplete at the end. Reads
only; also reads a journal that is being written, or of an orchestrator that was killed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.inspect.fate.facts import (
    CANCELLED,
    Check,
    Decider,
    Fate,
    Group,
    Lengths,
    Place,
    Sequence,
    Tally,
    of_the_whole,
)
from services.cli.inspect.trace.reading import open_journal
from services.common.records.types import Purpose
from services.common.telemetry.metrics import TrainerKey
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.parsers import state_from_json
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row
from services.orchestrator.state.groups import split_sequence_id
from services.orchestrator.state.run_control import RunState


@dataclass(slots=True)
class Fates:
    """Sums of a run. A step is the training step that a policy was at when the task group was issued."""

    tallies: dict[tuple[str, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    lengths: dict[str, Lengths] = field(default_factory=lambda: defaultdict(Lengths))
    checks: list[Check] = field(default_factory=list)
    num_passed_over: int = 0  # prompts that curation has excluded
    num_unreadable: int = 0  # damaged records
    num_updates_skipped: Counter[str] = field(default_factory=Counter)  # optimizer updates, by policy

    @property
    def policies(self) -> list[str]:
        return sorted({policy for policy, _ in self.tallies})

    def steps(self, policy: str) -> dict[int, Tally]:
        return {step: self.tallies[policy, step] for p, step in sorted(self.tallies) if p == policy}

    def total(self, policy: str, step: int | None = None) -> Tally:
        whole = Tally()
        for number, tally in self.steps(policy).items():
            if step is None or number == step:
                whole.add(tally)
        return whole

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


def read_fates(run_dir: Path) -> Fates:
    """Raises ``ConfigError`` when the directory has no journal, or that of a release without the fates of sequences."""
    with closing(open_journal(run_dir)) as reader:
        return _Reading(reader).run()


class _Reading:
    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._found = Fates()
        self._decider = Decider(self._load)
        self._open: dict[str, Group] = {}
        self._versions: dict[str, int] = {}  # the newest, at the present position
        self._num_repeated = 0  # records of a slot that had one
        self._num_issued = 0  # training groups
        self._positions = 0  # of the curriculum, that were drawn
        self._in_batches: Counter[str] = Counter()  # fresh sequences that batch records name, by policy
        self._batch_tokens: dict[tuple[str, int], int] = {}  # trained ones, as the trainer counts them
        self._counted: Counter[tuple[str, int]] = Counter()  # the same, from the sequences

    def run(self) -> Fates:
        for row in self._reader.rows_of(records.VERSION):
            policy, _, number = row.key.rpartition("/")
            newest = self._decider.newest
            newest[policy] = max(int(number), newest.get(policy, -1))
        last_state: Row | None = None
        for row in self._reader.rows():
            if row.kind == records.STATE:
                last_state = row
            else:
                self._take(row)
        if last_state is not None and (state := self._load(last_state)) is not None:
            self._decider.is_finished = state_from_json(state).phase is RunState.FINISHED
        for name in list(self._open):
            self._fold(name)
        self._found.num_passed_over = self._positions - self._num_issued
        self._found.checks = list(self._checks())
        return self._found

    def _load(self, row: Row) -> dict[str, Any] | None:
        record = self._reader.load(row)
        self._found.num_unreadable += record is None
        return record

    def _take(self, row: Row) -> None:
        if row.kind == records.GROUP:
            self._issued(row)
        elif row.kind == records.VERSION:
            self._published(row)
        elif row.kind == records.BATCH:
            self._batch(row)
        elif row.kind in (records.TRAJECTORY, records.FAILURE):
            self._resolved(row)
        elif row.kind in (records.VERDICT, records.CLOSED) and (group := self._open.get(row.key)) is not None:
            if (record := self._load(row)) is None:
                return
            if row.kind == records.VERDICT:
                group.verdicts = records.verdicts_from_json(record)
            else:
                group.closed = records.closed_reason(record)
            # A verdict of an earlier release may come after the close that it causes; without sequences there is none.
            no_sequences = len(group.failures) >= group.num_slots
            if group.closed and (group.closed in CANCELLED or group.verdicts is not None or no_sequences):
                self._fold(row.key)

    def _issued(self, row: Row) -> None:
        record = self._load(row)
        if record is None:
            return
        issued = records.group_from_json(record)
        if issued.order.purpose is not Purpose.TRAIN:
            return
        self._num_issued += 1
        self._positions = max(self._positions, issued.position + 1)
        # Those that it was born for are trained; journals of an earlier release name none.
        policies = issued.order.policies or list(issued.born) or list(self._versions)
        steps = {policy: self._versions.get(policy, 0) + 1 for policy in policies}
        self._open[row.key] = Group(steps=steps, num_slots=len(issued.order.indices))
        for key in steps.items():
            tally = self._found.tallies[key]
            tally.issued_groups += 1
            tally.issued_rollouts += len(issued.order.indices)

    def _published(self, row: Row) -> None:
        policy, _, number = row.key.rpartition("/")
        if int(number) > self._versions.get(policy, -1) and (record := self._load(row)) is not None:
            self._versions[policy] = int(number)
            _, _, metrics = records.version_from_json(record)
            skipped = metrics.get(TrainerKey.UPDATES_SKIPPED, 0.0)
            self._found.num_updates_skipped[policy] += round(skipped)

    def _resolved(self, row: Row) -> None:
        name, _, index = row.key.rpartition("/")
        group = self._open.get(name)
        if group is None:
            return
        slot = int(index)
        if slot in group.trajectories or slot in group.failures:
            self._num_repeated += 1
        elif row.kind == records.TRAJECTORY:
            group.trajectories[slot] = row
        else:
            record = self._load(row)
            group.failures[slot] = "" if record is None else rollouts.failure_from_json(record).reason

    def _batch(self, row: Row) -> None:
        if (record := self._load(row)) is None:
            return
        batch = records.batch_from_json(record)
        for entry in batch.entries:
            name, index, position = split_sequence_id(entry.sequence_id)
            if not entry.replayed:
                self._in_batches[batch.policy] += 1
                if (group := self._open.get(name)) is not None:
                    group.used.setdefault((index, position), (batch.training_step, entry.num_masked_tokens))
        if not any(entry.replayed for entry in batch.entries):
            # Lengths of sequences that are trained again are dropped by then.
            total = sum(totals.num_trained_tokens for totals in batch.minibatches)
            self._batch_tokens[batch.policy, batch.training_step] = total

    # --- a task group of which nothing more comes ---------------------------------------------------------------------

    def _fold(self, name: str) -> None:
        group = self._open.pop(name)
        by_slot: dict[str, dict[int, list[Fate]]] = {policy: defaultdict(list) for policy in group.steps}
        for place, sequence in self._decider.sequences(group).items():
            if sequence.policy in by_slot:
                by_slot[sequence.policy][place[0]].append(sequence.fate)
                self._count(group, place, sequence)
        for policy, step in group.steps.items():
            tally = self._found.tallies[policy, step]
            of_rollouts = [
                self._decider.rollout(group, slot, by_slot[policy].get(slot)) for slot in range(group.num_slots)
            ]
            tally.rollouts.update(of_rollouts)
            tally.failures.update(group.failures.values())
            tally.groups[of_the_whole(of_rollouts)] += 1
            told = None if group.verdicts is None else [v for v in group.verdicts if v.policy == policy]
            tally.sampled_sequences += (
                sum(map(len, by_slot[policy].values())) if told is None else sum(v.num_sequences for v in told)
            )

    def _count(self, group: Group, place: Place, sequence: Sequence) -> None:
        key = (sequence.policy, group.steps[sequence.policy])
        tally = self._found.tallies[key]
        tally.sequences[sequence.fate] += 1
        training_step, masked = group.used.get(place, (0, 0))
        rest = sequence.num_tokens - masked
        tally.tokens[sequence.fate] += sequence.num_tokens if sequence.fate is Fate.MASKED else rest
        if masked and sequence.fate is not Fate.MASKED:
            tally.tokens[Fate.MASKED] += masked
        if training_step:
            self._counted[sequence.policy, training_step] += rest
        if not sequence.fate.in_flight and sequence.fate is not Fate.UNKNOWN:
            trained = rest if sequence.fate is Fate.TRAINED else 0
            self._found.lengths[sequence.policy].add(key[1], sequence.fate, sequence.num_tokens, trained)

    def _checks(self) -> Iterator[Check]:
        for policy in self._found.policies:
            total = self._found.total(policy)
            yield Check(f"task groups of {policy} issued = their fates", total.issued_groups, total.groups.total())
            yield Check(f"rollouts of {policy} issued = their fates", total.issued_rollouts, total.rollouts.total())
            sampled = total.sampled_sequences
            yield Check(f"sequences of {policy} sampled = their fates", sampled, total.sequences.total())
            used = sum(total.sequences[fate] for fate in (Fate.TRAINED, Fate.IN_TRAINING, Fate.MASKED))
            yield Check(
                f"fresh sequences in batches of {policy} = those of its rollouts", self._in_batches[policy], used
            )
            told = {key: tokens for key, tokens in self._batch_tokens.items() if key[0] == policy}
            counted = sum(self._counted[key] for key in told)
            yield Check(f"trained tokens in batches of {policy} = those of its sequences", sum(told.values()), counted)
        yield Check("records of slots that had one already = 0", 0, self._num_repeated)
