"""Reading a whole journal: which records are whole, which are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.console import Column, FittingTable, format_bytes, say
from services.cli.inspect.trace.reading import open_journal
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.storage.scan import Damage, DamageReason
from services.orchestrator.journal.storage.segments import Row

Advance = Callable[[int, int], None]  # (records done, records in all)


@contextmanager
def shown(console: Console | None) -> Iterator[Advance]:
    if console is None or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading records", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


_SHOWN = 20
_ROWS = 20_000  # looked up at once


@dataclass(slots=True)
class Verified:
    """The result of reading all records."""

    records: Counter[str] = field(default_factory=Counter)  # by kind
    num_bytes: Counter[str] = field(default_factory=Counter)
    damage: list[Damage] = field(default_factory=list)
    torn: list[Damage] = field(default_factory=list)  # ends of segments that were never acknowledged
    lost: list[tuple[int, int]] = field(default_factory=list)  # runs of numbers without a record
    num_set_aside: int = 0

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage or self.lost)


def verify_journal(run_dir: Path, advance: Advance) -> Verified:
    """Raises ``ConfigError`` when the directory has no journal."""
    with closing(open_journal(run_dir)) as reader:
        found = Verified(num_set_aside=len(Quarantine.of(reader)))
        for row, _ in walk(reader, advance):
            found.records[row.kind] += 1
            found.num_bytes[row.kind] += row.length
        for span in reader.damage():
            (found.torn if span.reason is DamageReason.TORN else found.damage).append(span)
        named = {span.number for span in found.damage}
        found.lost = [run for run in reader.gaps() if not set(range(run[0], min(run[1], run[0] + 999) + 1)) <= named]
        return found


def walk(reader: JournalReader, advance: Advance) -> Iterator[tuple[Row, bytes | None]]:
    """Every record with its line; None for a damaged record."""
    last = reader.last_number()
    # In parts: a reader that stays in one query keeps the writer from emptying the index's log.
    for begin in range(1, last + 1, _ROWS):
        end = begin + _ROWS
        for row in list(
            reader.select("r.number >= ? AND r.number < ?", (begin, end), lambda row: begin <= row.number < end)  # noqa: B023
        ):
            yield row, reader.load_line(row)
        advance(min(end, last), last)


def as_object(found: Verified) -> dict[str, Any]:
    return {
        "records": dict(found.records),
        "num_bytes": dict(found.num_bytes),
        "damage": [{**asdict(span), "reason": span.reason.value} for span in found.damage],
        "torn": [{**asdict(span), "reason": span.reason.value} for span in found.torn],
        "lost_numbers": found.lost,
        "set_aside": found.num_set_aside,
    }


def show_verified(found: Verified, console: Console) -> None:
    table = FittingTable(
        [Column("kind"), Column("records", "right"), Column("bytes", "right"), Column("damaged", "right")]
    )
    damaged = Counter(span.kind for span in found.damage)
    for kind in sorted({*found.records, *damaged}):
        table.add_row(kind, f"{found.records[kind]:,}", format_bytes(found.num_bytes[kind]), str(damaged[kind] or ""))
    console.print(table)
    for span in found.damage[:_SHOWN]:
        say(console, f"damaged: {span}", "red")
    if len(found.damage) > _SHOWN:
        console.print(f"... and {len(found.damage) - _SHOWN} more", style="red")
    for first, last in found.lost[:_SHOWN]:
        console.print(f"lost: records {first} to {last} are in no segment", style="red")
    for span in found.torn:
        say(console, f"never acknowledged, or being written: {span}", "dim")
    if found.num_set_aside:
        say(console, f"{found.num_set_aside} records are set aside: rollmill journal RUN list --set-aside")
    verdict = "damaged: a start sets these records aside and goes on" if found.is_damaged else "every record is whole"
    console.print(verdict, style="red" if found.is_damaged else "green")
