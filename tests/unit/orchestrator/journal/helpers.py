"""Journals of two kinds of records, and what a reader finds in them."""

from __future__ import annotations

import asyncio
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
    await asyncio.gather(*(journal.append(KINDS[n % 2], f"k{n}", {"n": n}) for n in numbers))


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
