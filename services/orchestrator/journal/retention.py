"""Which trajectory segments may be deleted: closed ones that no replay and nothing live can need.

Batches since the oldest kept checkpoint of their policy are never collected, nor what they refer to. A segment goes as
a whole or stays. Batches, versions, task groups and evaluations stay for ever; they are small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.writer import Journal


def collect(journal: Journal, oldest_checkpoint_steps: Mapping[str, int], live_groups: Collection[str]) -> list[int]:
    """Delete what may go; returns the segments. Blocking: call it in a thread.

    ``oldest_checkpoint_steps``: by policy, the oldest checkpoint that its trainer may start from.

    ``live_groups`` are task groups that are running or have sequences in a buffer; what is recorded after they were
    listed lies in a segment that is still being written.
    """
    current = journal.current_segments().get(records.TRAJECTORY)
    reader = JournalReader(journal.directory)
    try:
        kept: set[int] = set()
        segments: set[int] = set()
        needed = set(live_groups)
        places: list[tuple[str, int]] = []
        for row in reader.rows():
            if row.kind == records.BATCH:
                policy, _, step = row.key.rpartition("/")
                if int(step) > oldest_checkpoint_steps.get(policy, 0):
                    record = reader.load(row)
                    entries = [] if record is None else records.batch_from_json(record).entries
                    needed.update(split_sequence_id(entry.sequence_id)[0] for entry in entries)
            elif row.kind == records.TRAJECTORY:
                segments.add(row.segment)
                places.append((row.key.rpartition("/")[0], row.segment))
        kept = {segment for group, segment in places if group in needed}
        if current is None:
            return []
        removable = sorted(segment for segment in segments - kept if segment < current)
        journal.remove_segments(records.TRAJECTORY, removable)
        return removable
    finally:
        reader.close()
