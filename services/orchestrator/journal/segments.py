"""Segment files: ``<kind>-000001.jsonl.zst``, records one after the other, written only at the end, rolled at a size.

They are the truth; the index is made from them. One kind per file, so that every line has the same columns and `datasets`
can open them. Knows nothing about SQLite or what the records mean.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from services.common.errors import ConfigError
from services.orchestrator.journal.files import Files

COLLECTED = "collected"  # kind of the records that name segments which retention deletes

_NAME = re.compile(r"^([a-z_]+)-(\d{6,15})\.jsonl\.zst$", re.ASCII)
_OLD_NAME = re.compile(r"^[a-z_]+-\d{6,}\.jsonl$")

_MOST_SEGMENTS = (
    10**12
)  # names may have numbers above that, which no run reaches: new segments are not numbered behind them

Place = tuple[str, int]  # kind and segment


def segment_path(directory: Path, kind: str, segment: int) -> Path:
    return directory / f"{kind}-{segment:06d}.jsonl.zst"


def sizes_in(directory: Path) -> dict[Place, int]:
    """Bytes of every segment file, in order of segment and kind; 0 for a name that is no file or leads to none.

    Raises ``ConfigError`` for a journal of plain jsonl segments.
    """
    found: dict[Place, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if match := _NAME.match(entry.name):
                size = _size_of(entry)
                if size is not None:
                    found[match[1], int(match[2])] = size
            elif _OLD_NAME.match(entry.name):
                raise ConfigError(
                    f"the journal in {directory} has plain jsonl segments ({entry.name}), which millrace wrote before its "
                    "segments were compressed (.jsonl.zst): go on with that release, or start a new run directory"
                )
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def _size_of(entry: os.DirEntry[str]) -> int | None:
    """None for a segment that was collected just now."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return 0 if entry.is_symlink() else None
    except OSError:  # a loop of links, or a disk that cannot read it
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def first_free(segments: Collection[int]) -> int:
    """The number of the next segment."""
    first = max((segment for segment in segments if segment < _MOST_SEGMENTS), default=0) + 1
    while first in segments:
        first += 1
    return first


class SegmentWriter:
    """The open segment of one kind."""

    def __init__(self, directory: Path, kind: str, first_segment: int, segment_bytes: int, files: Files) -> None:
        self._directory = directory
        self._kind = kind
        self._segment_bytes = segment_bytes
        self._files = files
        self.segment = first_segment
        self.size = 0
        self._fd = self._open()

    def _open(self) -> int:
        return self._files.create(segment_path(self._directory, self._kind, self.segment))

    def roll_if_full(self) -> bool:
        """Begin the next segment; True when it did. Called between transactions only, so that a failed one can be undone."""
        if self.size < self._segment_bytes:
            return False
        old = self._fd
        self.segment += 1
        try:
            self._fd = self._open()
        except OSError:
            self.segment -= 1
            raise
        self.size = 0
        self._files.close(old)
        return True

    def append(self, data: bytes) -> None:
        """Write at the end; on an error the caller calls ``undo``."""
        self._files.write(self._fd, data, self.size)
        self.size += len(data)

    def undo(self, size: int) -> None:
        """Back to an earlier size of this segment: what this process wrote and never acknowledged."""
        self.size = size
        self._files.truncate(self._fd, size)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        self._files.close(self._fd)
