"""A disk that loses power: records the journal's file operations, and builds the states after a cut at any of them.

Only synced data is certain: contents of a file by ``sync``, names in a directory by ``sync_directory``. Any part of the
rest may be present: each write whole, in part, as zeros or not at all, in any order; each name added or not.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.journal.segments import Files

Operation = tuple[Any, ...]


class RecordingFiles(Files):
    """Runs the operations and keeps a trace of them with numbered files. Syncs are recorded without a real sync: no
    power is lost here."""

    def __init__(self) -> None:
        self.trace: list[Operation] = []
        self.fail_writes_of = b""  # one write that has these bytes fails in its middle
        self._open: dict[int, int] = {}  # descriptor -> file
        self._named: dict[str, int] = {}
        self._num_files = 0

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._num_files += 1
        self._open[fd] = self._named[path.name] = self._num_files
        self.trace.append(("create", self._num_files, path.name))
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.fail_writes_of and self.fail_writes_of in data:
            self.fail_writes_of, data = b"", data[: len(data) // 2]
            self.write(fd, data, offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, data, offset)
        self.trace.append(("write", self._open[fd], offset, bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.trace.append(("truncate", self._open[fd], size))

    def sync(self, fd: int) -> None:
        self.trace.append(("sync", self._open[fd]))

    def sync_file(self, path: Path) -> None:
        self.trace.append(("sync", self._named[path.name]))

    def sync_directory(self, path: Path) -> None:
        self.trace.append(("sync_directory", path.name))


@dataclass
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[Operation] = field(default_factory=list)


class Disk:
    """The certain and the uncertain state after a part of a trace."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[int, _File] = {}
        self._names: dict[str, int] = {}  # that are sure
        self._pending: list[Operation] = []  # names that were added since
        self._is_there = False  # the directory itself

    def apply(self, operation: Operation) -> None:
        match operation:
            case ("create", number, _):
                self._files[number] = _File()
                self._pending.append(operation)
            case ("sync_directory", name) if name == self._directory:
                self._names |= {name: number for _, number, name in self._pending}
                self._pending.clear()
            case ("sync_directory", _):
                self._is_there = True
            case ("sync", number):
                file = self._files[number]
                for pending in file.pending:
                    _change(file.synced, pending)
                file.pending.clear()
            case ("write" | "truncate", number, *_):
                self._files[number].pending.append(operation)

    def lose_power(self, draw: random.Random) -> dict[str, bytes]:
        """Contents by name, as one cut may leave them."""
        if not self._is_there and draw.random() < 0.5:
            return {}
        names = self._names | {name: number for _, number, name in self._pending if draw.random() < 0.5}
        return {name: self._left_of(self._files[number], draw) for name, number in names.items()}

    def _left_of(self, file: _File, draw: random.Random) -> bytes:
        left = bytearray(file.synced)
        pending = list(file.pending)
        if draw.random() < 0.3:
            draw.shuffle(pending)
        chance = draw.choice((0.0, 0.5, 0.9, 1.0))
        for operation in pending:
            if draw.random() >= chance:
                continue
            if operation[0] == "write" and draw.random() < 0.5:
                kind, number, offset, data = operation
                cut = draw.randrange(len(data) + 1)
                zeros = bytes(len(data) - cut) if draw.random() < 0.5 else b""  # the length was written, the data not
                operation = (kind, number, offset, data[:cut] + zeros)
            _change(left, operation)
        return bytes(left)


def _change(content: bytearray, operation: Operation) -> None:
    if operation[0] == "truncate":
        size = operation[2]
        del content[size:]
        content.extend(bytes(size - len(content)))
        return
    _, _, offset, data = operation
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data
