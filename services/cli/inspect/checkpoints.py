"""The checkpoints of a run: lists and verifies them, exports one, and trains a step again from one.

A replay works on a run directory alone: the journal for batches and digests, the checkpoints for where to begin. On a CPU the
arithmetic is bit-exact, so the digests are equal; on a GPU they may differ, and the metrics say how far things are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from services.cli.console import FittingTable, columns, format_bytes, format_span, say
from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.checkpoints import (
    Manifest,
    checkpoints_directory,
    checkpoints_in,
    find_damage,
    is_set_aside,
    read_manifest,
    reason_of,
    steps,
)
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError, CorruptDataError, InfrastructureError, RollmillError
from services.common.export import Exported, ExportForm, check_target, export_checkpoint, work_bytes
from services.common.records import RankBatch
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.trainer.replay import replay


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
            numbers = (row.key.rpartition("/") for row in reader.rows_of(entries.VERSION))
            newest = max((int(number) for of, _, number in numbers if of == policy), default=-1)
            lost = tuple(step for step in range(after + 1, newest + 1) if not _is_whole(reader, policy, step))
            return cls(newest_version=newest, lost=lost)
        finally:
            reader.close()

    def replay_from(self, step: int) -> str:
        """In words.

        >>> Recorded(newest_version=9, lost=(3,)).replay_from(2)
        'no: the batch of step 3 is gone'
        >>> Recorded(newest_version=9, lost=(3, 5)).replay_from(2)
        'no: the batch of step 3 and 1 more is gone'
        >>> Recorded(newest_version=9, lost=(3,)).replay_from(4)
        'yes: 5 steps'
        >>> Recorded(newest_version=9).replay_from(10)  # told to leave before it was published
        'yes: 0 steps'
        >>> Recorded(newest_version=9).replay_from(11)
        'no: the journal ends at version 9'
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
    key = entries.batch_key(policy, step)
    found = reader.find(entries.BATCH, [key]).get(key)
    if found is None:
        return False
    places = (split_sequence_id(entry.sequence_id) for entry in entries.from_json(entries.BatchRecord, found).entries)
    wanted = {entries.trajectory_key(group, index) for group, index, _ in places}
    return {row.key for row in reader.find_rows(entries.TRAJECTORY, wanted)} == wanted


@dataclass(slots=True, kw_only=True)
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
        own = ("policy", "step", "state", "verified", "can_be_exported", "replay")
        of_manifest = ("size_bytes", "num_ranks", "num_updates", "written_at")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.manifest, name, None) for name in of_manifest},
            "path": str(self.path),
            "damaged": self.is_damaged,
        }


def policies_of(run_dir: Path) -> list[str]:
    """The policies that have a directory of checkpoints; raises ``ConfigError`` where there is no run."""
    check_run_directory(run_dir)
    root = run_dir / "checkpoints"
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def find(run_dir: Path, *, verify: bool) -> list[Found]:
    """Every checkpoint of every policy; with ``verify`` all their bytes are read, else only manifests and sizes."""
    read = []
    for policy in policies_of(run_dir):
        directory = checkpoints_directory(run_dir, policy)
        recorded = Recorded.read(run_dir, policy, min(steps(directory), default=0))
        for step, path in checkpoints_in(directory):
            found = Found(policy=policy, step=step, path=path)
            if is_set_aside(path):
                found.set_aside = reason_of(path)
            else:
                found.replay = recorded.replay_from(step)
            try:
                found.manifest = read_manifest(path)
            except (CorruptDataError, ConfigError) as error:
                found.damage = error.message
            read.append(found)
    whole = [(found, found.manifest) for found in read if found.manifest is not None]
    total = sum(manifest.size_bytes for _, manifest in whole) if verify else 0
    with _progress("verifying", total) as advance:
        for found, manifest in whole:
            found.damage = find_damage(found.path, manifest.files, advance, by_size=not verify)
            found.verified = verify
    return [found for found in read if found.path.exists()]  # a trainer at work may have removed one meanwhile


def tell_checkpoints(run_dir: Path, console: Console, *, verify: bool, as_object: bool) -> bool:
    """List the checkpoints; returns whether all are complete and undamaged."""
    found = find(run_dir, verify=verify)
    if as_object:
        console.print_json(json.dumps({"run": str(run_dir), "checkpoints": [each.as_object() for each in found]}))
    elif not found:
        console.print(f"{run_dir} has no checkpoint yet: the first comes at policies.<name>.trainer.checkpoint_every")
    else:
        console.print(_table(found))
        for each in found:
            if each.is_damaged:
                say(console, f"{each.path.name}: {each.set_aside or each.damage}", "red")
                if each.can_be_exported:
                    told = f"  its weights: rollmill export {run_dir} --policy {each.policy} --step {each.step}"
                    say(console, told)
        if not verify:
            console.print("only manifests and sizes were looked at; --verify reads every byte", style="dim")
    return not any(each.is_damaged for each in found)


def export_run(
    run_dir: Path,
    policy: str | None,
    step: int | None,
    output: Path | None,
    form: ExportForm = ExportForm.MERGED,
    base: Path | None = None,
) -> Exported:
    """Export a checkpoint of a run, the newest that is whole where none is named.

    Raises:
        ConfigError: there is no such checkpoint, or the target is not an export.
        CorruptDataError: the one that was named is damaged.
        InfrastructureError: the disk refused the write.
    """
    policy = _chosen_policy(run_dir, policy, policies_of(run_dir))
    candidates = _candidates(run_dir, policy, step)
    refused = []
    for number, path in candidates:
        ending = "-adapter" if form is ExportForm.ADAPTER else ""
        target = (output or run_files.export(run_dir, f"{policy}-{number:06d}{ending}")).absolute()
        check_target(target)
        try:
            with _progress(f"exporting step {number}", work_bytes(read_manifest(path))) as advance:
                return export_checkpoint(path, target, advance, form=form, base=base)
        except CorruptDataError as error:
            refused.append(error.message)
        except OSError as error:
            raise InfrastructureError(
                f"{target} cannot be written: {error}; make room, or name another place with -o"
            ) from error
    raise CorruptDataError(
        f"no checkpoint of {policy} can be exported: {'; '.join(refused)}; `rollmill checkpoints {run_dir} --verify` looks "
        "at all of them"
    )


def _chosen_policy(run_dir: Path, policy: str | None, there: list[str]) -> str:
    """The policy that is named, else the only one. Raises ``ConfigError``."""
    if not there:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet: the first comes at policies.<name>.trainer.checkpoint_every"
        )
    if policy is None and len(there) > 1:
        raise ConfigError(f"this run has several policies: write --policy with one of {', '.join(there)}")
    if policy not in (None, *there):
        raise ConfigError(f"this run has no checkpoints of a policy {policy!r}; it has those of {', '.join(there)}")
    return policy or there[0]


def _candidates(run_dir: Path, policy: str, step: int | None) -> list[tuple[int, Path]]:
    """Checkpoints to try, in order; for a named step also one that was set aside, because its weights may be intact."""
    listed = checkpoints_in(checkpoints_directory(run_dir, policy))
    there = ", ".join(str(number) for number, _ in listed)
    if step is not None:
        if chosen := [place for place in listed if place[0] == step]:
            return chosen
        raise ConfigError(f"{run_dir} has no checkpoint of {policy} at step {step}; it has {there or 'none'}")
    if standing := [place for place in listed if not is_set_aside(place[1])]:
        return standing[::-1]
    hint = f": try --step with one that was set aside as damaged ({there})" if there else ""
    raise ConfigError(f"{run_dir} has no checkpoint of {policy}{hint}")


def _table(found: list[Found]) -> FittingTable:
    table = FittingTable(columns("policy | >step | state | >size | >age | >ranks:2 | the run can go on from it:1"))
    for each in found:
        words = Text(each.state.partition(":")[0], style="red" if each.is_damaged else "green")
        cells = ["", "", ""]
        if manifest := each.manifest:
            old = format_span(max(0.0, time.time() - manifest.written_at))
            cells = [format_bytes(manifest.size_bytes), old, str(manifest.num_ranks)]
        replayed = Text(each.replay.removesuffix(": 0 steps"))
        table.add_row(Text(each.policy), str(each.step), words, *cells, replayed)
    return table


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line on standard error, if that is a terminal and the work takes time."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not total) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


def replay_step(
    run_dir: Path, policy: str | None, training_step: int, told: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train the steps from the checkpoint before ``training_step`` to ``training_step``, on their recorded batches.

    ``told`` is called with the progress and the result.

    Raises:
        ConfigError: the run has several policies and none was named, or not the one named, or the step was never
        published. CorruptDataError: a batch that is not in the journal any more (older than the last checkpoint).
    """
    run_dir = run_dir.resolve()
    recipe = load_resolved(run_dir)
    name = _chosen_policy(run_dir, policy, list(recipe.trained_policies))
    with closing(JournalReader(run_files.journal(run_dir))) as reader:
        expected = _published_digest(reader, name, training_step)
        told(f"loading {name} from the checkpoint before step {training_step}")

        def share_of(step: int) -> RankBatch:
            told(f"training step {step} of {training_step} again")
            return read_batch(reader, name, step).share(rank=0, num_ranks=1)

        replayed = replay(recipe, run_dir, name, training_step, share_of)
    equal = "the same weights as" if replayed.digest == expected else "other weights than"
    told(f"step {training_step} of {name}: {equal} the published version")
    return replayed.report(expected)


def _published_digest(reader: JournalReader, policy: str, version: int) -> str:
    for row in reader.rows():
        if row.kind == entries.VERSION and (record := reader.load(row)) is not None:
            found = entries.from_json(entries.VersionRecord, record).version
            if (found.policy, found.number) == (policy, version):
                return found.digest
    raise ConfigError(
        f"version {version} of {policy} was never published in this run: --step is a finished training step"
    )
