"""Command line of the orchestrator, and the paths of its files in the run directory."""

from __future__ import annotations

import argparse
import fcntl
import os
import struct
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


_FLOCK = "hhqqi4x"  # struct flock: kind, origin, begin, length (0 is all), pid
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


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
            kind = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0]
            return "" if kind == fcntl.F_UNLCK else f"{self._holder}, pid {_pid_in(fd)}"
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
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            pid = _pid_in(self._fd)
            os.close(self._fd)
            raise ConfigError(
                f"{self._path.parent} is in use by another {self._holder} (pid {pid}): stop that one, "
                "or start a run of its own with another directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _pid_in(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
