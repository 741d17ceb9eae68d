"""Repairs the journal of a run without a running orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import orjson

from services.cli.inspect.journal.checks import Advance, walk
from services.cli.inspect.trace.reading import open_journal
from services.common import run_files
from services.common.errors import BatchLostError
from services.common.records.fates import SetAsideReason
from services.orchestrator.buffer.assembly import read_what_is_left
from services.orchestrator.config import Settings
from services.orchestrator.journal import records
from services.orchestrator.journal.index import INDEX_FILE, remove_index
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.parsers import parser_of
from services.orchestrator.journal.reader import UNREADABLE, JournalReader, Quarantine, numbered
from services.orchestrator.journal.records import SetAside
from services.orchestrator.journal.segments import DamageReason
from services.orchestrator.lock import RunLock


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


@contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    """Keep an orchestrator from starting meanwhile; raises ``ConfigError`` when one is there."""
    open_journal(run_dir).close()
    with RunLock(Settings(run_dir).lock_file):
        yield
