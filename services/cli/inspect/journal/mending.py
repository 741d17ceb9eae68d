"""Repairs and compacts the journal of a run without a running orchestrator."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import orjson

from services.cli.inspect.journal.checks import Advance, walk
from services.cli.inspect.trace.reading import open_journal
from services.common import run_files
from services.common.checkpoints import checkpoints_directory, steps
from services.common.config.reading.loading import load_resolved
from services.common.config.training.policy import ReplayConfig
from services.common.errors import BatchLostError, InfrastructureError
from services.common.records.fates import SetAsideReason
from services.orchestrator.buffer.recorded import read_what_is_left
from services.orchestrator.config import Settings
from services.orchestrator.journal import records
from services.orchestrator.journal.parsers import parser_of
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import SetAside
from services.orchestrator.journal.retention import Collected, carry_out, plan
from services.orchestrator.journal.storage.index import INDEX_FILE, remove_index
from services.orchestrator.journal.storage.scan import DamageReason
from services.orchestrator.journal.survey import UNREADABLE, numbered, open_groups
from services.orchestrator.journal.writer import Journal
from services.orchestrator.lock import RunLock

_EVERY = sys.maxsize


def repair_journal(run_dir: Path, advance: Advance, *, dry_run: bool) -> list[SetAside]:
    """The records that are set aside, or would be.

    Raises:
        ConfigError: there is no journal, or an orchestrator holds the lock.
    """
    with _held(run_dir):
        if not dry_run:
            open_journal(run_dir).close()  # a directory without one is refused before anything is removed
            remove_index(run_files.journal(run_dir) / INDEX_FILE)
        return asyncio.run(_repair(run_dir, advance, dry_run))


async def _repair(run_dir: Path, advance: Advance, dry_run: bool) -> list[SetAside]:
    journal = None if dry_run else Journal(run_files.journal(run_dir))
    try:
        with closing(open_journal(run_dir)) as reader:
            aside = Quarantine.of(reader)
            known = set(aside)
            _look_at_all(reader, aside, advance)
            new = [noted for noted in aside if noted not in known]
            if journal is not None:
                journal.start()
                aside.write(journal)
            return new
    finally:
        if journal is not None:
            await journal.close()


def _look_at_all(reader: JournalReader, aside: Quarantine, advance: Advance) -> None:
    for row, line in walk(reader, advance):
        if line is None:
            aside.add(row, SetAsideReason.DAMAGED)
            continue
        try:
            parser_of(row.kind)(orjson.loads(line))
        except UNREADABLE as error:
            aside.add(row, SetAsideReason.UNREADABLE, f"{type(error).__name__}: {error}")
    for span in reader.damage():
        if span.reason not in (DamageReason.TORN, DamageReason.REPEATED):
            aside.add_span(span)
    published = {numbered(row) for row in reader.rows_of(records.VERSION)}
    for row in reader.rows_of(records.BATCH):
        policy, step = numbered(row)
        if row in aside or step is None or (policy, step) in published:
            continue
        try:
            read_what_is_left(reader, policy, step)
        except BatchLostError as error:
            aside.add(row, SetAsideReason.REFUSED, error.message)


def compact_journal(run_dir: Path, *, dry_run: bool) -> Collected:
    """The records that are deleted, or would be.

    Raises:
        ConfigError: there is no journal or recipe, or an orchestrator holds the lock.
        InfrastructureError: the disk refuses the rewritten files.
    """
    recipe = load_resolved(run_dir)
    oldest = {
        policy: min(steps(checkpoints_directory(run_dir, policy)), default=0) - _trained_again(settings.batch.replay)
        for policy, settings in recipe.trained_policies.items()
    }
    with _held(run_dir):
        return asyncio.run(_compact(run_dir, oldest, dry_run))


async def _compact(run_dir: Path, oldest: dict[str, int], dry_run: bool) -> Collected:
    with closing(open_journal(run_dir)) as reader:
        live = {row.key for row in open_groups(reader)}
        plans = plan(reader, oldest, live, {records.TRAJECTORY: _EVERY, records.STATE: _EVERY})
    if dry_run:
        return Collected(
            removed=[(p.kind, segment) for p in plans for segment in p.remove],
            rewritten=[(p.kind, segment) for p in plans for segment in p.rewrite],
            num_bytes=sum(p.num_bytes for p in plans),
        )
    journal = Journal(run_files.journal(run_dir))
    journal.start()
    try:
        return await asyncio.to_thread(carry_out, journal, plans, most_rewritten=_EVERY)
    except OSError as error:
        raise InfrastructureError(f"not all was rewritten ({error}): make room, and run it again") from error
    finally:
        await journal.close()


def _trained_again(replay: ReplayConfig) -> int:
    """From how many steps back groups may be drawn again."""
    return replay.max_staleness + 1 if replay.ratio > 0 else 0


@contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    """Keep an orchestrator from starting meanwhile; raises ``ConfigError`` when one is there."""
    open_journal(run_dir).close()
    with RunLock(Settings(run_dir).lock_file):
        yield
