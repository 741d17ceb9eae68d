"""Brings an index up to date with the segments: adds what it lacks, sets aside what is gone, trusts nothing that differs.

A segment is trusted as far as it is indexed when its file is at least as long as that, and the last indexed record's header
stands where the index says. Segments that retention deleted are told from lost ones by the journal's own records of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.orchestrator.journal.damage import Damage, DamageReason
from services.orchestrator.journal.index import Index, Indexed, Row
from services.orchestrator.journal.scan import header_before, scan
from services.orchestrator.journal.segments import Place, segment_path, sizes_in

log = structlog.get_logger()

_ROWS = 20_000  # of one transaction
_LOGGED = 20  # damaged spans that are logged one by one


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an index stands to the segments."""

    sizes: dict[Place, int]  # of all segments
    known: dict[Place, Indexed]
    missing: list[Place]  # indexed, and no file
    replaced: list[Place]  # the file is not the one that was indexed
    shortened: list[Place]  # indexed up to behind the file's end
    behind: list[Place]  # the file goes on behind what is indexed


def compare(directory: Path, index: Index, ends: Mapping[Place, int] | None = None) -> Comparison:
    """Look at file sizes and one header per segment. ``ends``: where segments that are being written end for us."""
    known = index.segments()  # before the sizes: what is being written is in its segment first
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
    """Make the index say what the segments have; returns the damage that was not known before.

    Raises ``sqlite3.Error``, ``OSError``, and ``CorruptDataError`` for records of a later format.
    """
    found = compare(directory, index, ends)
    told: list[Damage] = []
    rewritten = index.rewritten()
    for place in (*found.replaced, *found.shortened):
        index.forget(*place)
    for place in found.sizes:  # in their order: of two records with one number the first is kept
        if place in found.replaced or place in found.shortened or place in found.behind:
            told += _scan_into(directory, index, place, found.sizes[place])
    rewritten = index.rewritten() - rewritten
    for place in found.shortened:
        if not rewritten[place]:  # by compaction, since the index was up to date
            told += _note_lost(index, place, found.known[place], found.sizes[place])
    for place, before in ((place, found.known[place]) for place in found.missing):
        lost = [] if place in index.collected() else [_lost(place, before)]
        index.forget(*place, lost)
        told += lost
    return told


def synchronise_one(directory: Path, index: Index, place: Place) -> list[Damage]:
    """Add a closed segment that the index does not know; returns its damage. Raises as ``synchronise``."""
    return _scan_into(directory, index, place, segment_path(directory, *place).stat().st_size)


def log_damage(damage: list[Damage], directory: Path) -> None:
    """Name each span, and their sum."""
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


def _note_lost(index: Index, place: Place, before: Indexed, size: int) -> list[Damage]:
    """What is gone behind the end of a segment."""
    left = index.segments(*place)[place]
    lost = Damage(
        kind=place[0], segment=place[1], offset=size, num_bytes=before.end - size, reason=DamageReason.LOST,
        num_records=max(0, before.num_records - left.num_records),
    )  # fmt: skip
    return index.add(place, (), left.end, [lost])


def _lost(place: Place, before: Indexed) -> Damage:
    return Damage(
        kind=place[0], segment=place[1], offset=0, num_bytes=before.end, reason=DamageReason.LOST,
        num_records=before.num_records,
    )  # fmt: skip
