"""Processes of the project beside a benchmark. Shared by the scripts of this folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def spawn(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start a command with the repository as its directory, one OpenMP thread, and silent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def orchestrator(run_dir: str) -> subprocess.Popen[bytes]:
    """The orchestrator of a run directory that holds a resolved recipe."""
    return spawn([sys.executable, "-m", "services.orchestrator", "--run-dir", run_dir])


def kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a process and all its descendants, the ended ones that were waited for included."""
    ticks, pending = 0, [pid]
    while pending:
        each = Path("/proc") / str(pending.pop())
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            for task in (each / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended, and its parent has its time
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int) -> float:
    """Seconds on a core of a process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
