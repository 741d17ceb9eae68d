"""Records of a journal as rows of a table."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from services.cli.console import Column, FittingTable, say
from services.cli.inspect.trace.reading import open_journal
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.storage.segments import Row

Listed = dict[str, Any]


def list_records(
    run_dir: Path, *, kind: str | None, key: str | None, number: int | None, last: int, content: bool
) -> list[Listed]:
    """The newest records that match, oldest first. Raises ``ConfigError`` when the directory has no journal."""
    with closing(open_journal(run_dir)) as reader:
        aside = Quarantine.of(reader)
        found: list[Row] = []
        for row in reversed(list(reader.rows())) if kind is None else reader.last_rows(kind):
            if (key is None or row.key.startswith(key)) and (number is None or row.number == number):
                found.append(row)
                if len(found) == last:
                    break
        return [_listed(reader, aside, row, content) for row in reversed(found)]


def list_set_aside(run_dir: Path, *, kind: str | None, key: str | None, number: int | None, last: int) -> list[Listed]:
    """Records that the run does not use, in the order in which they were set aside."""
    with closing(open_journal(run_dir)) as reader:
        found = [
            {**asdict(noted), "reason": noted.reason.value}
            for noted in Quarantine.of(reader)
            if kind in (None, noted.kind) and number in (None, noted.number) and noted.key.startswith(key or "")
        ]
        return found[-last:]


def _listed(reader: JournalReader, aside: Quarantine, row: Row, content: bool) -> Listed:
    line = reader.load_line(row)
    state = "set aside" if row in aside else "damaged" if line is None else ""
    listed = {
        "number": row.number, "kind": row.kind, "key": row.key, "written_at": row.written_at, "segment": row.segment,
        "offset": row.offset, "num_bytes": row.length, "state": state,
    }  # fmt: skip
    if content:
        listed["content"] = None if line is None else orjson.loads(line)
    return listed


def show_records(found: list[Listed], console: Console) -> None:
    if not found:
        console.print("no record matches")
        return
    table = FittingTable(
        [
            *(Column("number", "right"), Column("kind"), Column("key"), Column("written", spare=1)),
            *(Column("segment", "right", 3), Column("at", "right", 4), Column("bytes", "right", 2), Column("state")),
        ]
    )
    for row in found:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written_at"])) if row["written_at"] else ""
        table.add_row(
            *(str(row["number"]), row["kind"], Text(row["key"]), written, str(row["segment"]), f"{row['offset']:,}"),
            *(f"{row['num_bytes']:,}", row["state"]),
        )
    console.print(table)
    for row in found:
        if "content" in row:
            line = orjson.dumps(row["content"]).decode()
            say(console, line)


def show_set_aside(found: list[Listed], console: Console) -> None:
    if not found:
        console.print("no record is set aside")
        return
    table = FittingTable(
        [
            *(Column("number", "right"), Column("kind"), Column("key"), Column("reason")),
            *(Column("segment", "right", 2), Column("at", "right", 3), Column("detail", spare=1)),
        ]
    )
    for row in found:
        table.add_row(
            *(str(row["number"] or "?"), row["kind"], Text(row["key"] or "?"), row["reason"], str(row["segment"])),
            *(f"{row['offset']:,}", Text(row["detail"])),
        )
    console.print(table)
