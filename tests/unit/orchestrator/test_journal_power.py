"""``durability``: acknowledged records survive a power cut at any write, or a kill -9."""

from __future__ import annotations

import asyncio
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from services.orchestrator.journal import journal as journal_module
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Files
from tests.unit.orchestrator.power import Disk, Operation, RecordingFiles

KINDS = ("things", "others", "rare")


async def put(journal: Journal, files: RecordingFiles, *numbers: int) -> None:
    """Submit together; each acknowledgement is a part of the trace."""
    kinds = [KINDS[2 if number % 7 == 0 else number % 2] for number in numbers]
    await asyncio.gather(
        *(
            journal.append(kind, f"k{n}", {"n": n}, lambda n=n: files.trace.append(("acknowledged", n)))
            for kind, n in zip(kinds, numbers, strict=True)
        )
    )


def kept(directory: Path) -> list[int]:
    """By opening the journal as a start does."""
    with closing(Journal(directory).reader) as reader:
        loaded = [reader.load(row) for row in reader.rows()]
    return [record["n"] for record in loaded if record is not None]


def check_every_cut(trace: list[Operation], scratch: Path, choices: int) -> int:
    """Cut the power after each operation; returns how many states were recovered from."""
    disk, acknowledged, num_states = Disk("journal"), set[int](), 0
    for position, operation in enumerate(trace):
        if operation[0] == "acknowledged":
            acknowledged.add(operation[1])
        elif operation[0] == "begins":
            acknowledged |= operation[1]
        else:
            disk.apply(operation)
        for choice in range(choices):
            draw = random.Random(f"{position} {choice}")
            directory = scratch / f"{position}-{choice}"
            directory.mkdir()
            for name, content in disk.lose_power(draw).items():
                (directory / name).write_bytes(content)
            found = kept(directory)
            assert len(found) == len(set(found)), f"a record twice: {found}"
            lost = acknowledged - set(found)
            assert not lost, f"lost after operation {position} {operation[:3]}, choice {choice}: {sorted(lost)}"
            shutil.rmtree(directory)
            num_states += 1
    return num_states


async def one_life(directory: Path, files: RecordingFiles, first: int, **settings: int) -> None:
    """Single records, a burst, a write that fails half way."""
    journal = Journal(directory, durability="power", files=files, **settings)
    journal.start()
    for number in range(first, first + 4):
        await put(journal, files, number)
    await put(journal, files, *range(first + 4, first + 12))
    files.fail_writes_of = f"k{first + 13}".encode()
    await put(journal, files, *range(first + 12, first + 16))
    await journal.close()


async def a_run(tmp_path: Path, files: RecordingFiles) -> None:
    """Two lives with small segments."""
    for first in (0, 100):
        await one_life(tmp_path / "journal", files, first, segment_bytes=300)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)


async def test_what_is_acknowledged_survives_a_power_cut_at_any_operation(tmp_path: Path) -> None:
    files = RecordingFiles()
    await a_run(tmp_path, files)
    assert {"create", "write", "truncate", "sync", "sync_directory"} <= {operation[0] for operation in files.trace}
    assert check_every_cut(files.trace, tmp_path, choices=1) > 100


@pytest.mark.parametrize("left_out", ["sync", "sync_directory"])
async def test_the_simulation_notices_a_sync_that_is_missing(tmp_path: Path, left_out: str) -> None:
    files = RecordingFiles()
    await a_run(tmp_path, files)
    trace = [operation for operation in files.trace if operation[0] != left_out]
    with pytest.raises(AssertionError, match="lost after operation"):
        check_every_cut(trace, tmp_path, choices=1)


async def test_what_a_start_found_unsynced_is_safe_once_it_acknowledges(tmp_path: Path) -> None:
    """A process without syncs is killed; the next one, with syncs, builds on the data in the page cache."""
    directory, files = tmp_path / "journal", RecordingFiles()
    first = Journal(directory, files=files)
    first.start()
    await put(first, files, *range(9))
    await first.close()
    unsure = [operation for operation in files.trace if operation[0] != "acknowledged"]
    files.trace.clear()
    second = Journal(directory, durability="power", files=files)
    second.start()
    files.trace.append(("begins", frozenset(range(9))))
    await put(second, files, 9)
    await second.close()
    check_every_cut([*unsure, *files.trace], tmp_path, choices=2)


async def test_a_process_that_is_killed_after_any_write_leaves_no_record_without_those_before(tmp_path: Path) -> None:
    """The close of a task group, say, without the verdict that was submitted before."""
    directory = tmp_path / "journal"

    class Copying(Files):
        copies: list[Path] = []

        def write(self, fd: int, data: bytes, offset: int) -> None:
            super().write(fd, data, offset)
            self.copies.append(tmp_path / f"copy-{len(self.copies)}")
            shutil.copytree(directory, self.copies[-1])

    files = Copying()
    journal = Journal(directory, files=files)
    for number in range(24):
        journal.submit(KINDS[number * number % 3], f"k{number}", {"n": number})
    journal.start()
    await journal.close()
    assert journal.num_commits < 4 < len(files.copies)
    for copy in files.copies:
        found = kept(copy)
        assert found == list(range(len(found))), copy.name
        with closing(JournalReader(copy)) as reader:
            assert not reader.gaps() and not reader.damage()
    assert len(found) == 24
