"""The index while a journal writes: late rows, locks, other holders and spoiled files."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from services.orchestrator.journal import index
from services.orchestrator.journal.index import INDEX_FILE
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.segments import Place, Row, sizes_in
from tests.unit.orchestrator.journal.helpers import (
    SPOILED,
    damage,
    kept,
    put,
    write,
)
from tests.waiting import WAIT_S


async def test_commits_share_a_transaction_of_the_index_and_readers_find_their_records_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions: list[int] = []
    add = index.Index.add

    def counted(self: index.Index, rows: Sequence[Row], ends: dict[Place, int]) -> None:
        transactions.append(len(rows))
        add(self, rows, ends)

    monkeypatch.setattr(index.Index, "add", counted)
    monkeypatch.setattr(index, "FLUSH_S", 600.0)
    monkeypatch.setattr(index, "FLUSH_ROWS", 20)
    journal = Journal(tmp_path, segment_bytes=1000)
    journal.start()
    for n in range(50):
        await put(journal, range(n, n + 1))
    assert journal.num_commits == 50
    assert transactions == [20, 20]
    assert len(sizes_in(tmp_path)) > 2, "a transaction has rows of several segments"
    assert kept(tmp_path) == list(range(50))
    await journal.close()
    assert transactions == [20, 20, 10]
    assert index.IndexKeeper(tmp_path).found == []


async def test_the_index_gets_the_last_rows_though_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "FLUSH_S", 0.02)
    journal = Journal(tmp_path)
    journal.start()
    await put(journal, range(3))
    with closing(sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)) as other:
        async with asyncio.timeout(WAIT_S):
            while other.execute("SELECT COUNT(*) FROM records").fetchone() != (3,):
                await asyncio.sleep(0.01)
    await journal.close()


async def test_what_a_killed_process_had_not_put_into_the_index_is_found_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "FLUSH_S", 600.0)
    journal = Journal(tmp_path / "killed")
    journal.start()
    await put(journal, range(7))
    shutil.copytree(tmp_path / "killed", tmp_path / "left")
    await journal.close()
    await write(tmp_path / "left", 7, 3)
    assert kept(tmp_path / "left") == list(range(10))
    assert damage(tmp_path / "left") == []


@pytest.mark.usefixtures("impatient")
async def test_another_holder_of_the_index_stops_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start()
    await put(journal, range(3))
    with closing(sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await asyncio.wait_for(put(journal, range(3, 9)), WAIT_S)
        assert kept(tmp_path) == list(range(9)), "what is acknowledged is found, before the index has it"
        again = Journal(tmp_path)
        assert again.damage == []
        other.execute("ROLLBACK")
    await put(journal, range(9, 10))
    await asyncio.sleep(0.05)
    await put(journal, range(10, 11))
    await journal.close()
    assert kept(tmp_path) == list(range(11))
    assert index.IndexKeeper(tmp_path).found == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["removed", "random", "emptied", "scribbled", "without a table"])
async def test_an_index_spoiled_while_it_is_used_stops_nothing(tmp_path: Path, how: str) -> None:
    journal = Journal(tmp_path)
    journal.start()
    await put(journal, range(3))
    if how == "without a table":
        with closing(sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)) as other:
            other.execute("DROP TABLE segments")
    else:
        SPOILED[how](tmp_path / INDEX_FILE)
    for n in range(3, 9):
        await asyncio.wait_for(put(journal, range(n, n + 1)), WAIT_S)
        await asyncio.sleep(0.02)
    assert kept(tmp_path) == list(range(9))
    await journal.close()
    assert kept(tmp_path) == list(range(9))
    await write(tmp_path, 9, 1)
    assert kept(tmp_path) == list(range(10))


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_stays_does_not_let_the_wal_file_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_WAL_BYTES", 200_000)
    journal = Journal(tmp_path)
    journal.start()
    await put(journal, range(64))
    with closing(sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT COUNT(*) FROM records").fetchone()
        for n in range(64, 150):
            await put(journal, range(n, n + 1))
            await asyncio.sleep(0.002)
        assert (tmp_path / f"{INDEX_FILE}-wal").stat().st_size < 400_000
        assert kept(tmp_path) == list(range(150))
    await asyncio.sleep(0.02)
    await put(journal, range(150, 151))
    assert kept(tmp_path) == list(range(151))
    await journal.close()
