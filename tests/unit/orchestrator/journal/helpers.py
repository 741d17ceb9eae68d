"""Journals of two kinds of records, and what a reader finds in them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Damage

KINDS = ("things", "others")


COUNT = 60


async def write(directory: Path, first: int, count: int, **settings: object) -> None:
    """Records ``first`` and following in one life of a journal, of two kinds in turn."""
    journal = Journal(directory, **settings)  # type: ignore[arg-type]
    journal.start()
    await put(journal, range(first, first + count))
    await journal.close()


async def put(journal: Journal, numbers: range) -> None:
    await asyncio.gather(*(journal.append(KINDS[n % 2], f"k{n}", lambda n=n: {"n": n}) for n in numbers))


def kept(directory: Path) -> list[int]:
    with closing(JournalReader(directory)) as reader:
        loaded = [reader.load(row) for row in reader.rows()]
        return [record["n"] for record in loaded if record is not None and "n" in record]


def damage(directory: Path) -> list[Damage]:
    with closing(JournalReader(directory)) as reader:
        return reader.damage()


def gaps(directory: Path) -> list[tuple[int, int]]:
    with closing(JournalReader(directory)) as reader:
        return reader.gaps()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    draw = random.Random(5)
    for _ in range(200):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def change_a_key(path: Path) -> None:
    """In the table alone: SQLite has no checksum that would notice."""
    data = path.read_bytes()
    at = data.index(b"thingsk20")
    path.write_bytes(data[:at] + b"thingsk2X" + data[at + 9 :])


SPOILED: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "random": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
    "scribbled": scribble,
    "one key": change_a_key,
}
