"""One orchestrator per run directory: a file lock that the kernel drops when the process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from services.common.errors import ConfigError


class RunLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> RunLock:
        """Raises ConfigError when another process holds the lock."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                f"{self._path.parent} is in use by another orchestrator (pid {holder}): stop that one, "
                "or start a run of its own with another directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
