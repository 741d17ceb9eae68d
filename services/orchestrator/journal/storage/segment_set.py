"""The open segments of all kinds, rolled at a size: appends whole commits, numbers their records, syncs names and data.

One thread calls this class; only ``current`` may be called from others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from services.common.system import disk
from services.orchestrator.journal.storage.index import Row
from services.orchestrator.journal.storage.segments import (
    Place,
    checksum_of,
    first_free,
    segment_path,
    sizes_in,
    write_header,
)


class Files:
    """Calls of the operating system; each returns after its completion. All raise ``OSError``."""

    def create(self, path: Path) -> int:
        """A new file's descriptor; refuses a file that exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``; an error may leave a part of the data."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Contents of the file survive a power cut; its name does so after ``sync_directory``."""
        os.fsync(fd)

    def sync_file(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Names that were added or removed survive a power cut, where the file system can sync directories."""
        disk.sync_directory(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing its file; at every moment one of them has that name."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)


Durability = Literal["process", "power"]  # failures that an acknowledged record survives


class Named(Protocol):
    """A record to write."""

    @property
    def kind(self) -> str: ...

    @property
    def key(self) -> str: ...


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
        """Begin the next segment; True for a new segment. Called between transactions only, so that a failed one can be
        undone."""
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
        """Append; on an error the caller calls ``undo``."""
        self._files.write(self._fd, data, self.size)
        self.size += len(data)

    def undo(self, size: int) -> None:
        """Truncate this segment to an earlier size: drops bytes of this process without an acknowledgement."""
        self.size = size
        self._files.truncate(self._fd, size)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        self._files.close(self._fd)


class SegmentSet:
    def __init__(
        self, directory: Path, *, next_number: int, segment_bytes: int, durability: Durability, files: Files
    ) -> None:
        """``next_number``: number of the next record. Syncs the segments of earlier processes with ``durability:
        power``."""
        self._directory = directory
        self._next_number = next_number
        self._segment_bytes = segment_bytes
        self._durability: Durability = durability
        self._files = files
        self._writers: dict[str, SegmentWriter] = {}
        self._names_changed = True  # in the directory since its last sync
        sizes = sizes_in(directory)
        # Every start begins new segments: the writer never appends to a segment of an earlier process.
        self._first_segment = first_free({segment for _, segment in sizes})
        if durability == "power":
            # An earlier process may have left unsynced records: from now on they count as acknowledged.
            for place in (place for place, size in sizes.items() if size):
                self._files.sync_file(segment_path(directory, *place))
            self._files.sync_directory(directory.parent)
            self._sync_names()

    def append(self, named: Sequence[Named], payloads: Sequence[bytes]) -> list[Row]:
        """Append one commit; with ``durability: power`` returns after the sync. On an error no record is written."""
        before: dict[str, int] = {}
        pieces: dict[str, list[bytes]] = {}  # by kind: one write for all of a kind
        ends: dict[str, int] = {}
        rows: list[Row] = []
        now = time.time()
        for kind in {entry.kind for entry in named}:
            if self._writer(kind).roll_if_full():
                self._names_changed = True
        try:
            for number, (entry, payload) in enumerate(zip(named, payloads, strict=True), start=self._next_number):
                writer = self._writers[entry.kind]
                header = write_header(number, now, entry.key, payload)
                offset = ends.setdefault(entry.kind, writer.size) + len(header)
                ends[entry.kind] = offset + len(payload)
                pieces.setdefault(entry.kind, []).extend((header, payload))
                rows.append(
                    Row(number, entry.kind, entry.key, writer.segment, offset, len(payload), checksum_of(payload), now)
                )
            for kind, found in pieces.items():
                before[kind] = self._writers[kind].size
                self._writers[kind].append(b"".join(found))
            if self._durability == "power":
                for kind in before:
                    self._writers[kind].sync()
                self._sync_names()
        except BaseException:
            for kind, size in before.items():
                self._writers[kind].undo(size)
            raise
        self._next_number += len(rows)
        return rows

    def remove(self, kind: str, segment: int) -> None:
        """Delete the file of a closed segment."""
        self._files.remove(segment_path(self._directory, kind, segment))
        self.renamed()

    def renamed(self) -> None:
        """Handle a changed name in the directory: with ``durability: power``, sync the directory."""
        self._names_changed = True
        if self._durability == "power":
            self._sync_names()

    def ends(self) -> dict[Place, int]:
        """Sizes of the open segments."""
        return {(kind, writer.segment): writer.size for kind, writer in self._writers.items()}

    def current(self) -> dict[str, int]:
        """The open segment of each kind; earlier ones never change again."""
        return {kind: writer.segment for kind, writer in self._writers.copy().items()}  # the writer thread may add one

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, kind: str) -> SegmentWriter:
        writer = self._writers.get(kind)
        if writer is None:
            writer = SegmentWriter(self._directory, kind, self._first_segment, self._segment_bytes, self._files)
            self._writers[kind] = writer
            self._names_changed = True
        return writer

    def _sync_names(self) -> None:
        if self._names_changed:
            self._files.sync_directory(self._directory)
            self._names_changed = False
