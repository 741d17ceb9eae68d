"""Processes of the project beside a benchmark. Shared by the scripts of this folder; it measures nothing itself."""

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
