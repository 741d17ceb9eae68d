"""A disk that loses power: the journal's file operations recorded, and the states that a cut after any of them may leave.

Sure is only what was synced: contents of a file by ``sync``, names in a directory by ``sync_directory``. Of the rest any
part may be there: each write whole, in part, as zeros or not at all, in any order; each name added or not, removed or not.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.journal.files import Files

Operation = tuple[Any, ...]


class RecordingFiles(Files):
    """Does what is asked and keeps a trace of it. Syncs are recorded alone: no power is lost here."""

    def __init__(self) -> None:
        self.trace: list[Operation] = []
        self.fail_writes_of = b""  # one write that has these bytes fails in its middle
        self._names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._names[fd] = path.name
        self.trace.append(("create", path.name))
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.fail_writes_of and self.fail_writes_of in data:
            self.fail_writes_of, data = b"", data[: len(data) // 2]
            self.write(fd, data, offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, data, offset)
        self.trace.append(("write", self._names[fd], offset, bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.trace.append(("truncate", self._names[fd], size))

    def sync(self, fd: int) -> None:
        self.trace.append(("sync", self._names[fd]))

    def sync_file(self, path: Path) -> None:
        self.trace.append(("sync", path.name))

    def sync_directory(self, path: Path) -> None:
        self.trace.append(("sync_directory", path.name))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.trace.append(("remove", path.name))


@dataclass
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[Operation] = field(default_factory=list)


class Disk:
    """What is sure and what is not after a part of a trace; names are never used twice."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[str, _File] = {}
        self._names: set[str] = set()  # that are sure
        self._pending: list[tuple[str, str]] = []  # names added or removed since
        self._is_there = False  # the directory itself

    def apply(self, operation: Operation) -> None:
        match operation:
            case ("create", name):
                self._files[name] = _File()
                self._pending.append(("add", name))
            case ("remove", name):
                self._pending.append(("remove", name))
            case ("sync_directory", name) if name == self._directory:
                for what, changed in self._pending:
                    (self._names.add if what == "add" else self._names.discard)(changed)
                self._pending.clear()
            case ("sync_directory", _):
                self._is_there = True
            case ("sync", name):
                file = self._files[name]
                for pending in file.pending:
                    _change(file.synced, pending)
                file.pending.clear()
            case ("write" | "truncate", name, *_):
                self._files[name].pending.append(operation)

    def lose_power(self, draw: random.Random) -> dict[str, bytes]:
        """Contents by name, as one cut may leave them."""
        if not self._is_there and draw.random() < 0.5:
            return {}
        names = set(self._names)
        for what, name in self._pending:
            if draw.random() < 0.5:
                (names.add if what == "add" else names.discard)(name)
        return {name: self._left_of(self._files[name], draw) for name in names}

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
                kind, name, offset, data = operation
                cut = draw.randrange(len(data) + 1)
                zeros = bytes(len(data) - cut) if draw.random() < 0.5 else b""  # the length was written, the data not
                operation = (kind, name, offset, data[:cut] + zeros)
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
