"""Checks that a run can resume from a checkpoint: the journal still has the batches trained after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common import run_files
from services.common.errors import MillraceError
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.state.groups import split_sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The batches and versions of a policy in the journal."""

    newest_version: int  # -1: none is published
    lost: tuple[int, ...] = ()  # training steps whose batch is not whole there, ascending
    unknown: str = ""  # why the journal cannot be asked

    @classmethod
    def read(cls, run_dir: Path, policy: str, after: int) -> Recorded:
        """Look at the batches of the training steps after ``after``."""
        try:
            reader = JournalReader(run_files.journal(run_dir))
        except (MillraceError, OSError) as error:
            return cls(newest_version=-1, unknown=f"the journal cannot be read: {error}")
        try:
            numbers = (row.key.rpartition("/") for row in reader.rows_of(records.VERSION))
            newest = max((int(number) for of, _, number in numbers if of == policy), default=-1)
            lost = tuple(step for step in range(after + 1, newest + 1) if not _is_whole(reader, policy, step))
            return cls(newest_version=newest, lost=lost)
        finally:
            reader.close()

    def replay_from(self, step: int) -> str:
        """In words.

        >>> Recorded(newest_version=9, lost=(3,)).replay_from(2)
        'no: the batch of step 3 is gone'
        >>> Recorded(newest_version=9, lost=(3,)).replay_from(4)
        'yes: 5 steps'
        """
        if self.unknown:
            return f"unknown: {self.unknown}"
        if step > self.newest_version + 1:
            known = f"ends at version {self.newest_version}" if self.newest_version >= 0 else "has no version"
            return f"no: the journal {known}"
        lost = [gone for gone in self.lost if gone > step]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            return f"no: the batch of step {lost[0]}{more} is gone"
        return f"yes: {max(self.newest_version - step, 0)} steps"


def _is_whole(reader: JournalReader, policy: str, step: int) -> bool:
    """Whether a batch and all its trajectories are recorded."""
    key = records.batch_key(policy, step)
    found = reader.find(records.BATCH, [key]).get(key)
    if found is None:
        return False
    places = (split_sequence_id(entry.sequence_id) for entry in records.batch_from_json(found).entries)
    wanted = {rollouts.trajectory_key(group, index) for group, index, _ in places}
    return {row.key for row in reader.find_rows(records.TRAJECTORY, wanted)} == wanted
