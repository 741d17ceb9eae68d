"""Reads recorded batches from the journal, whole or without what is lost; also without an orchestrator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from services.common.errors import (
    BatchLostError,
    CorruptDataError,
)
from services.common.records.types import MinibatchTotals, Sequence, Trajectory
from services.orchestrator.buffer.assembly import Batch
from services.orchestrator.buffer.experience import AdvantageGroup, Member, mask_sequence
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchEntry, BatchRecord
from services.orchestrator.state.groups import GroupBy, group_key, split_sequence_id


def read_batch(reader: JournalReader, policy: str, training_step: int) -> Batch:
    """A recorded batch from the journal, also without an orchestrator; ``CorruptDataError`` for an incomplete one."""
    record, sequences = _read(reader, policy, training_step)
    missing = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if missing:
        lost = sorted({name.rpartition("/")[0] for name in missing})
        raise CorruptDataError(
            f"the batch of step {training_step} of {policy} lacks trajectories {', '.join(lost[:5])}: they are damaged "
            "(`rollmill journal RUN verify`), or were collected, as orchestrator.retention: needed does with those from "
            "before the oldest kept checkpoint"
        )
    return Batch(record=record, sequences=sequences, replayed=True)


def read_what_is_left(reader: JournalReader, policy: str, training_step: int) -> tuple[Batch, list[str]]:
    """A recorded batch without its lost sequences, and the ids of those.

    Raises:
        BatchLostError: no sequence of the batch is usable.
    """
    record, sequences = _read(reader, policy, training_step)
    lost = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if lost:
        record = reduced(record, sequences)
    return Batch(record=record, sequences=sequences, replayed=True), lost


def reduced(record: BatchRecord, sequences: Mapping[str, Sequence]) -> BatchRecord:
    """The batch reduced to these of its sequences; raises ``BatchLostError`` without any."""
    left = tuple(entry for entry in record.entries if entry.sequence_id in sequences)
    if not left:
        raise BatchLostError(
            f"no trajectory of the batch of step {record.training_step} of {record.policy} can be used any more: "
            "the next start of the orchestrator sets it aside, if its version is not published, and assembles another one"
        )
    return replace(record, entries=left, minibatches=_totals(left, sequences, len(record.minibatches)))


def _totals(
    entries: Iterable[BatchEntry], sequences: Mapping[str, Sequence], num_minibatches: int
) -> tuple[MinibatchTotals, ...]:
    counts = [[0, 0] for _ in range(num_minibatches)]
    for entry in entries:
        counts[entry.minibatch][0] += 1
        counts[entry.minibatch][1] += sequences[entry.sequence_id].num_trained_tokens
    return tuple(MinibatchTotals(num_sequences=n, num_trained_tokens=t) for n, t in counts)


def read_fresh_groups(
    reader: JournalReader, policy: str, training_step: int, group_by: GroupBy
) -> list[AdvantageGroup]:
    """The groups that a recorded batch trained first, in its order, without incomplete groups."""
    record, sequences = _read(reader, policy, training_step)
    found: dict[tuple[str, str, str, int], list[BatchEntry]] = {}
    lost: set[str] = set()  # task groups
    for entry in record.entries:
        task_group_id = split_sequence_id(entry.sequence_id)[0]
        sequence = sequences.get(entry.sequence_id)
        if sequence is None:
            lost.add(task_group_id)
        elif not entry.replayed:
            found.setdefault((task_group_id, *group_key(sequence, group_by)), []).append(entry)
    return [
        AdvantageGroup(
            task_group_id=task_group_id, policy=policy, role=role, attempt=attempt,
            members=tuple(
                Member(
                    sequence_id=e.sequence_id, sequence=sequences[e.sequence_id],
                    trained_from=e.trained_from, num_masked_tokens=e.num_masked_tokens,
                )
                for e in entries
            ),
            mean=entries[0].group_mean, std=entries[0].group_std, num_compared=entries[0].group_size, group_by=group_by,
            advantage_scale=entries[0].advantage_scale,
        )
        for (task_group_id, _, role, attempt), entries in found.items()
        if task_group_id not in lost
    ]  # fmt: skip


def _read(reader: JournalReader, policy: str, training_step: int) -> tuple[BatchRecord, dict[str, Sequence]]:
    """A recorded batch with its readable sequences."""
    key = records.batch_key(policy, training_step)
    found = reader.find(records.BATCH, [key]).get(key)
    if found is None:
        raise BatchLostError(f"the batch of step {training_step} of {policy} is not in the journal")
    record = records.batch_from_json(found)
    places = [split_sequence_id(entry.sequence_id) for entry in record.entries]
    keys = [rollouts.trajectory_key(group, index) for group, index, _ in places]
    readable = ((key, _trajectory(value)) for key, value in reader.find(records.TRAJECTORY, keys).items())
    trajectories = {key: trajectory for key, trajectory in readable if trajectory is not None}
    sequences = {
        entry.sequence_id: _as_trained(trajectories[key].sequences[position], entry)
        for entry, key, (_, _, position) in zip(record.entries, keys, places, strict=True)
        if key in trajectories
    }
    return record, sequences


def _trajectory(record: dict[str, Any]) -> Trajectory | None:
    """None for a record that is no trajectory."""
    try:
        return rollouts.trajectory_from_json(record)
    except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _as_trained(sequence: Sequence, entry: BatchEntry) -> Sequence:
    if entry.trained_from:
        sequence = mask_sequence(sequence, entry.trained_from)
    return sequence if entry.reward is None else replace(sequence, reward=entry.reward)
