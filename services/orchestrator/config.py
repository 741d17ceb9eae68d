"""Command line of the orchestrator, and the paths of its files in the run directory."""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from services.common.errors import ConfigError

DESCRIPTION = """\
The orchestrator: draws tasks, issues rollouts within the staleness bound, keeps every trajectory in a journal,
assembles batches, and knows which weight versions exist. Replicas and trainers dial in.
"""
EPILOG = """\
DIR is a run directory with recipe.json (`rollmill run` writes it). Started again on the same directory, even after
kill -9, the run goes on with everything that was acknowledged. Exit codes: 0 the run has ended or SIGTERM came,
2 the recipe, the data or the directory cannot be used (the message says why), 75 the disk became full while it started
(start again: the orchestrator then waits for free space).
"""


@dataclass(frozen=True, slots=True)
class Settings:
    run_dir: Path
    port: int | None = None  # instead of the recipe's

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "orchestrator.lock"


def parse(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m services.orchestrator",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    parser.add_argument("--port", type=int, help="gRPC port instead of the recipe's; 0 takes a free one")
    options = parser.parse_args(arguments)
    return Settings(run_dir=options.run_dir, port=options.port)


# --- File lock of a run directory: one orchestrator and one launcher; the kernel drops the lock when the process dies.


_LOOKS_S = 5.0  # longest wait for processes that look; each look takes microseconds, on a busy machine milliseconds
_PAUSE_S = 0.01


class RunLock:
    """``holder``: kind of the locking process, for the error."""

    def __init__(self, path: Path, holder: str = "orchestrator") -> None:
        self._path = path
        self._holder = holder
        self._fd = -1

    def held_by(self) -> str:
        """The holder of the lock, such as "launcher, pid 17"; empty for a free lock."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)  # also on a file system that is read-only
        except FileNotFoundError:
            return ""
        try:
            # Shared: processes that look do not see each other.
            return "" if _locked(fd, fcntl.LOCK_SH) else f"{self._holder}, pid {_pid_in(fd)}"
        finally:
            os.close(fd)

    def __enter__(self) -> RunLock:
        """Raises ConfigError when another process holds the lock, or the directory cannot be written."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written ({error.strerror}): this lock admits one process per run"
            ) from error
        if not self._take():
            pid = _pid_in(self._fd)
            os.close(self._fd)
            raise ConfigError(
                f"{self._path.parent} is in use by another {self._holder} (pid {pid}): stop that one, "
                "or start a run of its own with another directory"
            )
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())
        return self

    def _take(self) -> bool:
        """False when another process holds the lock. Processes that look (``held_by``) share it, and are waited for."""
        until = time.monotonic() + _LOOKS_S
        while not _locked(self._fd, fcntl.LOCK_EX):
            if not _locked(self._fd, fcntl.LOCK_SH) or time.monotonic() > until:
                return False
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            time.sleep(_PAUSE_S)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
