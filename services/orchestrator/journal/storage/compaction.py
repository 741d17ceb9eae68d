"""Rewrites closed segments without the records that retention releases.

    closed segment -> needed records, byte for byte, into <segment>.compacting -> sync -> record: these numbers went
                   -> rename over the old file and new places in the index, in one transaction of the index

A crash leaves the whole old file or the whole new file, and at worst an index with the old positions, which the next
start detects. A segment with damage stays unchanged: only bytes that were read may go. Independent of the meaning of
records.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import CorruptDataError
from services.orchestrator.journal.storage.scan import Damage, DamageReason, scan
from services.orchestrator.journal.storage.segments import Files, Row, checksum_of, header_bytes, segment_path

_SUFFIX = ".compacting"
_WRITE_BYTES = 1024 * 1024


@dataclass(slots=True)
class Prepared:
    """A rewritten segment beside the old one, ready for the rename."""

    rows: list[Row] = field(default_factory=list)  # positions of the kept records in the rewritten file
    size: int = 0
    left_out: list[int] = field(default_factory=list)  # numbers of records


def prepare(directory: Path, kind: str, segment: int, keep: Collection[int], files: Files) -> Prepared:
    """Write the kept records of a segment to a file beside the segment.

    Raises:
        CorruptDataError: the segment has damage, and stays unchanged.
        OSError: the disk refuses the write; no file has changed.
    """
    source, target = segment_path(directory, kind, segment), _prepared(directory, kind, segment)
    files.remove(target)
    prepared = Prepared()
    fd = files.create(target)
    try:
        with source.open("rb", buffering=0) as segment_file:
            written = 0
            for data in _kept(segment_file.fileno(), scan(directory, kind, segment), keep, prepared):
                files.write(fd, data, written)
                written += len(data)
        files.sync(fd)
    except BaseException:
        files.remove(target)
        raise
    finally:
        files.close(fd)
    return prepared


def take_place(directory: Path, kind: str, segment: int, files: Files) -> None:
    """Replace the segment with the file that ``prepare`` wrote."""
    files.replace(_prepared(directory, kind, segment), segment_path(directory, kind, segment))


def remove_prepared(directory: Path, files: Files) -> None:
    """Delete the files of a process that died before the rename."""
    for path in directory.glob(f"*{_SUFFIX}"):
        files.remove(path)


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers.

    >>> runs_of([3, 1, 2, 7])
    [(1, 3), (7, 7)]
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _prepared(directory: Path, kind: str, segment: int) -> Path:
    path = segment_path(directory, kind, segment)
    return path.with_name(path.name + _SUFFIX)


def _kept(fd: int, found: Iterable[Row | Damage], keep: Collection[int], prepared: Prepared) -> Iterator[bytes]:
    """The bytes of the records to keep, in large pieces."""
    waiting: list[bytes] = []
    num_bytes = 0
    for row in found:
        if isinstance(row, Damage):
            if row.reason is DamageReason.TORN:  # never acknowledged
                continue
            raise CorruptDataError(f"{row}: the segment stays unchanged")
        if row.number not in keep:
            prepared.left_out.append(row.number)
            continue
        begin = row.offset - header_bytes(row.key)
        data = os.pread(fd, row.offset + row.length - begin, begin)
        if checksum_of(data[row.offset - begin :]) != row.checksum:
            raise CorruptDataError(
                f"record {row.number} ({row.kind} {row.key}) is damaged: its segment stays unchanged"
            )
        prepared.size += len(data)
        prepared.rows.append(row._replace(offset=prepared.size - row.length))
        waiting.append(data)
        num_bytes += len(data)
        if num_bytes >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield b"".join(waiting)
