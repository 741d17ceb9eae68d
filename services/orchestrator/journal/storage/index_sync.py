"""Synchronizes the index with the segments: adds missing records, sets lost ones aside, and rejects differing entries.

The sync trusts the indexed part of a segment when its file is long enough and the header of the last indexed record is
at its indexed position. The journal's own records tell deleted segments from lost ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from services.common.errors import CorruptDataError
from services.orchestrator.journal.storage.index import Index, Indexed
from services.orchestrator.journal.storage.scan import Damage, DamageReason, header_before, scan
from services.orchestrator.journal.storage.segments import COLLECTED, Place, Row, Unpacker, segment_path, sizes_in

log = structlog.get_logger()

_ROWS = 20_000  # of one transaction
_LOGGED = 20  # damaged spans that are logged one by one


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between the index and the segments."""

    sizes: dict[Place, int]  # of all segments
    known: dict[Place, Indexed]
    missing: list[Place]  # indexed, and no file
    replaced: list[Place]  # the file is not the one that was indexed
    shortened: list[Place]  # indexed up to behind the file's end
    behind: list[Place]  # the file has bytes after the indexed ones


def compare(directory: Path, index: Index, ends: Mapping[Place, int] | None = None) -> Comparison:
    """Compare file sizes and one header per segment. ``ends``: own ends of the open segments."""
    known = index.segments()  # before the sizes: a record in progress appears in its segment first
    damaged = {(d.kind, d.segment) for d in index.damage()}
    sizes = {place: min(size, (ends or {}).get(place, size)) for place, size in sizes_in(directory).items()}
    found = Comparison(sizes, known, [place for place in known if place not in sizes], [], [], [])
    for place, size in sizes.items():
        before = known.get(place)
        if before is None:
            (found.replaced if place in damaged else found.behind).append(place)
        elif size < before.end:
            found.shortened.append(place)
        elif not _is_same(directory, place, before) or (size > before.end and place in damaged):
            found.replaced.append(place)
        elif size > before.end:
            found.behind.append(place)
    return found


def synchronise(directory: Path, index: Index, ends: Mapping[Place, int] | None = None) -> list[Damage]:
    """Update the index from the segments; returns the new damage.

    Raises ``sqlite3.Error``, ``OSError``, and ``CorruptDataError`` for records of a later format.
    """
    found = compare(directory, index, ends)
    told: list[Damage] = []
    before_cut = {place: _numbers(index, place) for place in found.shortened}
    for place in (*found.replaced, *found.shortened):
        index.forget(*place)
    for place in found.sizes:  # in their order: of two records with one number the first is kept
        if place in found.replaced or place in found.shortened or place in found.behind:
            told += _scan_into(directory, index, place, found.sizes[place])
    for place, numbers in before_cut.items():
        rewritten = _left_out(directory, index, place)
        gone = {number for number in numbers - _numbers(index, place) if not _is_in(number, rewritten)}
        if gone or not rewritten:
            told += _note_lost(index, place, found.known[place].end, found.sizes[place], len(gone))
    for place, before in ((place, found.known[place]) for place in found.missing):
        lost = [] if place in index.collected() else [_lost(place, before)]
        index.forget(*place, lost)
        told += lost
    return told


def log_damage(damage: list[Damage], directory: Path) -> None:
    """Log each span, and their sum."""
    for span in damage[:_LOGGED]:
        log.error("journal.damaged", span=str(span), directory=str(directory), effect="its bytes stay where they are")
    if damage:
        log.error("journal.damage", spans=len(damage), num_bytes=sum(span.num_bytes for span in damage))


def _scan_into(directory: Path, index: Index, place: Place, size: int) -> list[Damage]:
    told: list[Damage] = []
    rows: list[Row] = []
    damage: list[Damage] = []
    before = index.segments(*place).get(place)
    for found in scan(directory, *place, start=0 if before is None else before.end, end=size):
        if isinstance(found, Damage):
            damage.append(found)
            continue
        rows.append(found)
        if len(rows) >= _ROWS:
            told += index.add(place, rows, found.offset + found.length, damage)
            rows, damage = [], []
    return told + index.add(place, rows, size, damage)


def _is_same(directory: Path, place: Place, before: Indexed) -> bool:
    if not before.num_records:
        return True
    header = header_before(directory, *place, before.last_offset, before.last_key)
    return header is not None and (header.number, header.key, header.checksum) == (
        before.last_number, before.last_key, before.last_checksum
    )  # fmt: skip


def _numbers(index: Index, place: Place) -> set[int]:
    return {row.number for row in index.select("r.kind = ? AND r.segment = ?", place)}


def _left_out(directory: Path, index: Index, place: Place) -> list[tuple[int, int]]:
    """Runs of record numbers that compaction left out of a segment, from its readable records."""
    runs: list[tuple[int, int]] = []
    for row in index.rows_of(COLLECTED, f"{place[0]}/{place[1]}/part"):
        try:
            with segment_path(directory, COLLECTED, row.segment).open("rb", buffering=0) as file:
                line = Unpacker().unpack(os.pread(file.fileno(), row.length, row.offset))
            runs += [(int(first), int(last)) for first, last in orjson.loads(line)["numbers"]]
        except (OSError, CorruptDataError, KeyError, TypeError, ValueError):
            continue
    return runs


def _is_in(number: int, runs: list[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in runs)


def _note_lost(index: Index, place: Place, before: int, size: int, num_records: int) -> list[Damage]:
    """Lost bytes after the end of a segment, which was at ``before``."""
    lost = Damage(
        kind=place[0], segment=place[1], offset=size, num_bytes=before - size, reason=DamageReason.LOST,
        num_records=num_records,
    )  # fmt: skip
    return index.add(place, (), index.segments(*place)[place].end, [lost])


def _lost(place: Place, before: Indexed) -> Damage:
    return Damage(
        kind=place[0], segment=place[1], offset=0, num_bytes=before.end, reason=DamageReason.LOST,
        num_records=before.num_records,
    )  # fmt: skip
