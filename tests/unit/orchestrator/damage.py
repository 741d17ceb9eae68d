"""Damages a journal, for tests of the recovery."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row, segment_path


def rows(run_dir: Path, kind: str, key: str | None = None) -> list[Row]:
    with closing(JournalReader(run_dir / "journal")) as reader:
        return list(reader.rows_of(kind, key))


def loaded(run_dir: Path, kind: str, key: str | None = None) -> list[dict[str, Any]]:
    """Records of a kind that can be read."""
    with closing(JournalReader(run_dir / "journal")) as reader:
        found = [reader.load(row) for row in reader.rows_of(kind, key)]
        return [record for record in found if record is not None]


def flip(run_dir: Path, kind: str, key: str, which: int = 0, *, header: bool = False) -> Row:
    """Flip bits in the middle of a record, or in its header: the record is then unknown."""
    row = rows(run_dir, kind, key)[which]
    path = segment_path(run_dir / "journal", row.kind, row.segment)
    data = bytearray(path.read_bytes())
    data[row.offset - 12 if header else row.offset + row.length // 2] ^= 0xFF
    path.write_bytes(data)
    return row
