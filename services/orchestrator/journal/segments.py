"""Segment files: ``<kind>-000001.jsonl``, one JSON object per line, written only at the end, rolled at a size.

One kind per file, so that every line has the same columns and `datasets` can open them. Knows nothing about SQLite or
what the records mean.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"^([a-z_]+)-(\d{6,})\.jsonl$")


def segment_path(directory: Path, kind: str, segment: int) -> Path:
    return directory / f"{kind}-{segment:06d}.jsonl"


def segments_in(directory: Path) -> list[tuple[str, int]]:
    """(kind, segment) of every segment file."""
    found = (_NAME.match(path.name) for path in sorted(directory.iterdir()))
    return [(match[1], int(match[2])) for match in found if match]


def cut_tails(directory: Path, ends: dict[tuple[str, int], int]) -> int:
    """Cut what no index row refers to off the end of every segment; returns the number of bytes cut.

    A crash between writing and committing leaves such a tail, perhaps in mid-line.
    """
    cut = 0
    for kind, segment in segments_in(directory):
        path = segment_path(directory, kind, segment)
        end = ends.get((kind, segment), 0)
        size = path.stat().st_size
        if size > end:
            cut += size - end
            os.truncate(path, end)
        if end == 0:
            path.unlink()
    return cut


class SegmentWriter:
    """The open segment of one kind."""

    def __init__(self, directory: Path, kind: str, first_segment: int, segment_bytes: int) -> None:
        self._directory = directory
        self._kind = kind
        self._segment_bytes = segment_bytes
        self.segment = first_segment
        self.size = 0
        self._fd = self._open()

    def _open(self) -> int:
        path = segment_path(self._directory, self._kind, self.segment)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def roll_if_full(self) -> None:
        """Begin the next segment. Called between transactions only, so that a failed one can be undone."""
        if self.size < self._segment_bytes:
            return
        old = self._fd
        self.segment += 1
        try:
            self._fd = self._open()
        except OSError:
            self.segment -= 1
            raise
        self.size = 0
        os.close(old)

    def append(self, data: bytes) -> None:
        """Write at the end; on an error the caller calls ``undo``."""
        view = memoryview(data)
        offset = self.size
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
        self.size = offset

    def undo(self, size: int) -> None:
        """Back to an earlier size of this segment."""
        self.size = size
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
