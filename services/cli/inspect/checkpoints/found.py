"""Lists the checkpoints of a run: whether each is whole, and whether the run can resume there. Read-only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.checkpoints import (
    Manifest,
    Progress,
    StoredFile,
    checkpoints_directory,
    find_damage,
    path_of,
    read_manifest,
    reason_of,
    set_aside_before,
    steps,
)
from services.common.errors import ConfigError, CorruptDataError, RollmillError
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
        except (RollmillError, OSError) as error:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One checkpoint on disk."""

    policy: str
    step: int
    path: Path
    set_aside: str = ""  # why a trainer has set it aside
    manifest: Manifest | None = None  # None where it cannot be read
    damage: str = ""  # the defect; empty if the checks that were made found none
    verified: bool = False  # every byte was read
    replay: str = ""  # whether the run can go on from it

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage or self.set_aside)

    @property
    def state(self) -> str:
        """In a word, and the damage, if any."""
        if self.set_aside:
            return f"set aside: {self.set_aside}"
        if self.damage:
            return f"damaged: {self.damage}"
        return "verified" if self.verified else "sizes agree"

    @property
    def can_be_exported(self) -> bool:
        """As far as was looked: the files with weights, config and tokenizer are whole."""
        names = [file.name for file in self.manifest.files_for_export()] if self.manifest else []
        return bool(names) and not any(name in self.damage for name in names)

    def as_object(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "policy": self.policy,
            "step": self.step,
            "path": str(self.path),
            "damaged": self.is_damaged,
            "state": self.state,
            "verified": self.verified,
            "can_be_exported": self.can_be_exported,
            "replay": self.replay,
            "size_bytes": manifest.size_bytes if manifest else None,
            "num_ranks": manifest.num_ranks if manifest else None,
            "num_updates": manifest.num_updates if manifest else None,
            "written_at": manifest.written_at if manifest else None,
        }


def policies_of(run_dir: Path) -> list[str]:
    """The policies that have a directory of checkpoints; raises ``ConfigError`` where there is no run."""
    check_run_directory(run_dir)
    root = run_dir / "checkpoints"
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def places(run_dir: Path, policy: str) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint of a policy, those set aside after those of the same step under their name."""
    directory = checkpoints_directory(run_dir, policy)
    named = [(step, path_of(directory, step)) for step in steps(directory)]
    return sorted([*named, *set_aside_before(directory)], key=lambda place: (place[0], place[1].name))


def total_bytes(run_dir: Path) -> int:
    """The bytes that a check of every checkpoint reads."""
    total = 0
    for policy in policies_of(run_dir):
        for _, path in places(run_dir, policy):
            try:
                total += read_manifest(path).size_bytes
            except (CorruptDataError, ConfigError):
                continue  # set by ``find``
    return total


def find(run_dir: Path, *, verify: bool, progress: Progress = lambda _: None) -> Iterator[Found]:
    """Every checkpoint of every policy; with ``verify`` all their bytes are read, else only manifests and sizes."""
    for policy in policies_of(run_dir):
        listed = places(run_dir, policy)
        standing = [step for step, path in listed if path == path_of(path.parent, step)]
        recorded = Recorded.read(run_dir, policy, min(standing, default=0))
        for step, path in listed:
            set_aside = "" if step in standing and path == path_of(path.parent, step) else reason_of(path)
            found = _look(policy, step, path, set_aside, recorded, verify, progress)
            if path.exists():  # else: the trainer of a running run has removed it meanwhile
                yield found


def _look(
    policy: str, step: int, path: Path, set_aside: str, recorded: Recorded, verify: bool, progress: Callable[[int], None]
) -> Found:  # fmt: skip
    replay = "" if set_aside else recorded.replay_from(step)
    try:
        manifest = read_manifest(path)
    except (CorruptDataError, ConfigError) as error:
        return Found(policy=policy, step=step, path=path, set_aside=set_aside, damage=error.message, replay=replay)
    files = list(manifest.files)
    damage = find_damage(path, files, progress) if verify else _sizes(path, files)
    return Found(
        policy=policy, step=step, path=path, set_aside=set_aside, manifest=manifest, damage=damage, verified=verify,
        replay=replay,
    )  # fmt: skip


def _sizes(path: Path, files: list[StoredFile]) -> str:
    wrong = []
    for file in files:
        try:
            size = (path / file.name).lstat().st_size
        except OSError as error:
            wrong.append(f"{file.name}: {error.strerror}")
            continue
        if size != file.size_bytes:
            wrong.append(f"{file.name} has {size} bytes; {file.size_bytes} were written")
    return "; ".join(wrong)


def age(written_at: int) -> str:
    """
    >>> age(int(time.time()) - 7200)
    '2 h'
    """
    seconds = max(time.time() - written_at, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
