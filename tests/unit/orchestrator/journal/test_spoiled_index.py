"""Any loss of the index costs no record: the segments are the truth."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from services.orchestrator.journal.index import INDEX_FILE
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from tests.unit.orchestrator.journal.helpers import (
    COUNT,
    SPOILED,
    gaps,
    kept,
    put,
    write,
)


@pytest.mark.parametrize("how", SPOILED)
async def test_a_spoiled_index_costs_no_record(tmp_path: Path, how: str) -> None:
    await write(tmp_path, 0, COUNT)
    SPOILED[how](tmp_path / INDEX_FILE)
    if how != "one key":  # a reader looks less closely than a start
        assert kept(tmp_path) == list(range(COUNT)), "read without a writer"
    journal = Journal(tmp_path)
    assert journal.damage == []
    journal.start()
    await put(journal, range(COUNT, COUNT + 3))
    await journal.close()
    assert kept(tmp_path) == list(range(COUNT + 3))
    assert gaps(tmp_path) == []
    with closing(JournalReader(tmp_path)) as reader:
        assert reader.find("things", ["k20", "k22"]) == {"k20": {"n": 20}, "k22": {"n": 22}}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("with_wal", [False, True])
async def test_an_index_of_an_earlier_time_costs_no_record(tmp_path: Path, with_wal: bool) -> None:
    """Copied back alone, or beside the -wal file of a later time."""
    directory, old = tmp_path / "journal", tmp_path / "old.sqlite"
    await write(directory, 0, 20)
    shutil.copy(directory / INDEX_FILE, old)
    await write(directory, 20, 20)
    journal = Journal(directory)
    journal.start()
    await put(journal, range(40, 60))
    wal = directory / f"{INDEX_FILE}-wal"
    assert wal.stat().st_size > 0
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    shutil.copy(old, copy / INDEX_FILE)
    if not with_wal:
        (copy / wal.name).unlink()
    await journal.close()
    assert kept(copy) == list(range(60))
    await write(copy, 60, 1)
    assert kept(copy) == list(range(61))


async def test_a_copy_without_the_wal_file_has_every_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.start()
    await put(journal, range(COUNT))
    shutil.copytree(tmp_path / "journal", tmp_path / "copy", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    await journal.close()
    await write(tmp_path / "copy", COUNT, 1)
    assert kept(tmp_path / "copy") == list(range(COUNT + 1))


async def test_the_index_of_another_directory_is_not_believed(tmp_path: Path) -> None:
    """Its numbers, segments and lengths are the same; its contents differ from the records here."""
    for name, first in (("a", 100), ("b", 300)):
        await write(tmp_path / name, first, COUNT)
    shutil.copy(tmp_path / "b" / INDEX_FILE, tmp_path / "a" / INDEX_FILE)
    assert kept(tmp_path / "a") == list(range(100, 100 + COUNT))
    await write(tmp_path / "a", 100 + COUNT, 1)
    assert kept(tmp_path / "a") == list(range(100, 101 + COUNT))
