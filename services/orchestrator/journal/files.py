"""The few file operations that the journal's durability rests on, in one place, so that a test can record or fail them."""

from __future__ import annotations

import os
from pathlib import Path

from services.common import disk


class Files:
    """Calls of the operating system, none of which returns before it is complete. All raise ``OSError``."""

    def create(self, path: Path) -> int:
        """A new file's descriptor; refuses a file that exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """All of ``data`` at ``offset``; on an error a part of it may be there."""
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
        """Give ``source`` the name ``target``, whose file goes; at every moment one of them has that name."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)
