"""``rollmill journal``: verifies, lists and exports the records of a run. Reads only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from rich.console import Console
from rich.progress import track
from rich.text import Text

from services.cli.console import FittingTable, columns, format_bytes, say
from services.cli.inspect.run_model import open_journal
from services.common.errors import ConfigError, CorruptDataError
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader, Quarantine
from services.orchestrator.journal.segments import Damage, DamageReason, Row

_SHOWN = 20


class Verified(NamedTuple):
    """The result of reading all records."""

    records: Counter[str]  # by kind
    num_bytes: Counter[str]
    damage: list[Damage]
    torn: list[Damage]  # ends of segments that were never acknowledged
    lost_numbers: list[tuple[int, int]]  # runs of numbers without a record
    set_aside: int

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage or self.lost_numbers)


def verify_journal(run_dir: Path, console: Console | None) -> Verified:
    """Raises ``ConfigError`` when the directory has no journal."""
    records, num_bytes = Counter[str](), Counter[str]()
    with closing(open_journal(run_dir)) as reader:
        aside = len(Quarantine.of(reader))
        for row, _ in _walk(reader, console):
            records[row.kind] += 1
            num_bytes[row.kind] += row.length
        spans = reader.damage()
        torn = [span for span in spans if span.reason is DamageReason.TORN]
        damage = [span for span in spans if span.reason is not DamageReason.TORN]
        named = {span.number for span in damage}
        lost = [run for run in reader.gaps() if not set(range(run[0], min(run[1], run[0] + 999) + 1)) <= named]
    return Verified(records, num_bytes, damage, torn, lost, aside)


def _walk(reader: JournalReader, console: Console | None) -> Iterator[tuple[Row, bytes | None]]:
    """Every record with its line, None for a damaged record; a console that is a terminal shows how far it is."""
    hidden = console is None or not console.is_terminal
    total = reader.last_number()
    for row in track(reader.rows(), "reading records", total, console=console, transient=True, disable=hidden):
        yield row, reader.load_line(row)


def as_object(found: Verified) -> dict[str, Any]:
    spans = {name: [asdict(span) for span in getattr(found, name)] for name in ("damage", "torn")}
    return {**found._asdict(), **spans}


def show_verified(found: Verified, console: Console) -> None:
    table = FittingTable(columns("kind | >records | >bytes | >damaged"))
    damaged = Counter(span.kind for span in found.damage)
    for kind in sorted({*found.records, *damaged}):
        table.add_row(kind, f"{found.records[kind]:,}", format_bytes(found.num_bytes[kind]), str(damaged[kind] or ""))
    console.print(table)
    for span in found.damage[:_SHOWN]:
        say(console, f"damaged: {span}", "red")
    if len(found.damage) > _SHOWN:
        console.print(f"... and {len(found.damage) - _SHOWN} more", style="red")
    for first, last in found.lost_numbers[:_SHOWN]:
        console.print(f"lost: records {first} to {last} are in no segment", style="red")
    for span in found.torn:
        say(console, f"never acknowledged, or being written: {span}", "dim")
    if found.set_aside:
        say(console, f"{found.set_aside} records are set aside: rollmill journal RUN list --set-aside")
    verdict = "damaged: a start sets these records aside and goes on" if found.is_damaged else "every record is whole"
    console.print(verdict, style="red" if found.is_damaged else "green")


Listed = dict[str, Any]


def list_records(
    run_dir: Path, *, kind: str | None, key: str | None, number: int | None, last: int, content: bool
) -> list[Listed]:
    """The newest records that match, oldest first. Raises ``ConfigError`` when the directory has no journal."""
    with closing(open_journal(run_dir)) as reader:
        aside = Quarantine.of(reader)
        found = reader.rows() if kind is None else reader.rows_of(kind)
        rows = [row for row in found if row.key.startswith(key or "") and number in (None, row.number)]
        return [_listed(reader, aside, row, content) for row in rows[-last:]]


def list_set_aside(run_dir: Path, *, kind: str | None, key: str | None, number: int | None, last: int) -> list[Listed]:
    """Records that the run does not use, in the order in which they were set aside."""
    with closing(open_journal(run_dir)) as reader:
        found = [
            asdict(noted)
            for noted in Quarantine.of(reader)
            if kind in (None, noted.kind) and number in (None, noted.number) and noted.key.startswith(key or "")
        ]
        return found[-last:]


def _listed(reader: JournalReader, aside: Quarantine, row: Row, content: bool) -> Listed:
    line = reader.load_line(row)
    listed = {
        **{name: getattr(row, name) for name in ("number", "kind", "key", "written_at", "segment", "offset")},
        "num_bytes": row.length,
        "state": "set aside" if row in aside else "damaged" if line is None else "",
    }
    if content:
        listed["content"] = None if line is None else orjson.loads(line)
    return listed


def show_records(found: list[Listed], console: Console) -> None:
    """Records, or those that were set aside, which have a reason and a detail and no time."""
    if not found:
        console.print("no record matches")
        return
    table = FittingTable(columns(">number | kind | key | written:1 | >segment:3 | >at:4 | >bytes:2 | state"))
    for row in found:
        at, size = row.get("written_at"), row.get("num_bytes")
        state = row["state"] if "state" in row else f"{row['reason']} {row['detail']}".strip()
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""
        table.add_row(
            *(str(row["number"] or "?"), row["kind"], Text(row["key"] or "?"), written, str(row["segment"])),
            *(f"{row['offset']:,}", f"{size:,}" if size else "", Text(state)),
        )
    console.print(table)
    for row in found:
        if "content" in row:
            say(console, orjson.dumps(row["content"]).decode())


def export_journal(run_dir: Path, output: Path, console: Console | None, *, kinds: Collection[str]) -> dict[Path, int]:
    """Write JSON lines, a file for each kind; returns rows by file. Records that cannot be read, or are set aside, are left
    out.

    Raises ``ConfigError``: there is no journal, or ``output`` cannot be written.
    """
    counts: Counter[Path] = Counter()
    try:
        with closing(open_journal(run_dir)) as reader, ExitStack() as opened:
            aside, files = Quarantine.of(reader), {}
            output.mkdir(parents=True, exist_ok=True)
            for row, line in _walk(reader, console):
                if line is None or row in aside or (kinds and row.kind not in kinds):
                    continue
                if row.kind == entries.TRAJECTORY:
                    try:
                        record = entries.plain_trajectory(orjson.loads(line))
                    except (CorruptDataError, KeyError, TypeError, ValueError):
                        continue
                    line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
                path = output / f"{row.kind}.jsonl"
                if path not in files:
                    files[path] = opened.enter_context(path.open("wb"))
                files[path].write(line)
                counts[path] += 1
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}): name another directory with -o") from None
    return dict(counts)
