"""Reading the journal back: durable records, found by kind and key, checked against what was written.

Knows nothing about what records mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.orchestrator.journal.index import INDEX_FILE, Index, Row, checksum_of
from services.orchestrator.journal.segments import segment_path

log = structlog.get_logger()


class JournalReader:
    """Reads durable records, beside the writer or without one. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = Index(directory / INDEX_FILE, "process")

    def rows(self) -> Iterator[Row]:
        return self._index.rows()

    def rows_of(self, kind: str, key: str | None = None) -> Iterator[Row]:
        """Every record of a kind in order; of one key where that is named."""
        return self._index.rows_of(kind, key)

    def select(self, condition: str, values: Sequence[str | int] = ()) -> Iterator[Row]:
        """Rows for which an SQL condition on ``records AS r`` holds, in order."""
        return self._index.select(condition, values)

    def last_rows(self, kind: str) -> Iterator[Row]:
        """Every record of a kind, the newest first."""
        return self._index.last_rows(kind)

    def last_number(self) -> int:
        """Of the newest record; 0 when there is none."""
        return self._index.last_number()

    def find_rows(self, kind: str, keys: Iterable[str]) -> list[Row]:
        """The first record of each key that there is."""
        return list({row.key: row for row in reversed(self._index.find(kind, keys))}.values())

    def find(self, kind: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The newest intact record of each key; keys without one are absent."""
        found: dict[str, dict[str, Any]] = {}
        for row in reversed(self._index.find(kind, keys)):
            if row.key not in found and (record := self.load(row)) is not None:
                found[row.key] = record
        return found

    def load(self, row: Row) -> dict[str, Any] | None:
        """One record, or None (logged) when its bytes are not what was written."""
        try:
            with segment_path(self._directory, row.kind, row.segment).open("rb", buffering=0) as file:
                line = os.pread(file.fileno(), row.length, row.offset)
        except FileNotFoundError:
            line = b""
        if len(line) != row.length or checksum_of(line) != row.checksum:
            log.error("journal.corrupted", kind=row.kind, key=row.key, segment=row.segment, offset=row.offset)
            return None
        record: dict[str, Any] = orjson.loads(line)
        return record

    def remove_segment(self, kind: str, segment: int) -> None:
        """Delete a closed segment: rows first, so that a crash in between leaves only an unreferenced file."""
        self._index.forget(kind, segment)
        segment_path(self._directory, kind, segment).unlink(missing_ok=True)

    def close(self) -> None:
        self._index.close()
