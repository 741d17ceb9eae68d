"""Starts ranks as real processes for tests, and shows what a rank said when one fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
RANKS_TIMEOUT_S = 300.0
LAST_LINES = 40


def start_ranks(module: str, arguments: Sequence[str], num_ranks: int, logs: Path) -> list[subprocess.Popen[bytes]]:
    """``python -m module`` once for each rank, as torchrun would; what each says goes to ``logs/rankN.log``.

    The store is ours from the start: its port is taken by whoever listens there, never found free and taken later.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank in range(num_ranks):
        with (logs / f"rank{rank}.log").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank)}, stdout=output, stderr=output,
                )
            )  # fmt: skip
    return started


def run_processes(processes: Sequence[subprocess.Popen[bytes]], logs: Path, timeout_s: float = RANKS_TIMEOUT_S) -> None:
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
            process.kill()
            process.wait()
    assert codes == [0] * len(processes), f"exit codes {codes} (None: still running)\n{last_words(logs)}"


def last_words(logs: Path) -> str:
    """The end of every log in a directory."""
    words = []
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        words.append(f"--- {path.name}\n" + "\n".join(lines))
    return "\n".join(words)
