"""Starts ranks as real processes for tests, and shows the output of a failed rank."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from services.cli.run.processes import ForkServer
from services.common.system.child import module_command
from services.common.system.processes import ChildProcess
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
RANKS_TIMEOUT_S = 300.0
LAST_LINES = 40


def fork_ranks(
    forks: ForkServer, module: str, arguments: Sequence[str], num_ranks: int, logs: Path
) -> list[ChildProcess]:
    """``python -m module`` once for each rank, from a process with finished imports, which saves each five seconds of a
    core; the output of each goes to ``logs/rankN.log``."""
    logs.mkdir(parents=True, exist_ok=True)
    argv = module_command(module, *arguments)
    started = [
        forks.start(argv, {**os.environ, **env}, logs / f"rank{rank}.log") for rank, env in enumerate(_ranks(num_ranks))
    ]
    found = [process for process in started if process is not None]
    assert len(found) == num_ranks, "the fork server has ended"
    return found


def _ranks(num_ranks: int) -> list[dict[str, str]]:
    """The environment variables of each rank."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**shared, "RANK": str(rank)} for rank in range(num_ranks)]


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A directory that ``make`` has filled, once for all workers of a test run that want the same."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    directory = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "made").exists():
            directory.mkdir(exist_ok=True)
            make(directory)
            (directory / "made").touch()
    return directory


def run_processes(processes: Sequence[ChildProcess], logs: Path, timeout_s: float = RANKS_TIMEOUT_S) -> None:
    """Wait for all to end well. ``AssertionError`` with the last words of every process when one does not."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert codes == [0] * len(processes), f"exit codes {codes} (None: still running)\n{last_words(logs)}"


def last_words(logs: Path) -> str:
    """The end of every log in a directory."""
    words = []
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        words.append(f"--- {path.name}\n" + "\n".join(lines))
    return "\n".join(words)
