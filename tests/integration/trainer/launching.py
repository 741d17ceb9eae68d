"""Starts ranks as real processes for tests, and shows what a rank said when one fails."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from services.cli.fork_server import ForkServer, Process
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
RANKS_TIMEOUT_S = 300.0
LAST_LINES = 40


def start_ranks(module: str, arguments: Sequence[str], num_ranks: int, logs: Path) -> list[subprocess.Popen[bytes]]:
    """``python -m module`` once for each rank, without a launcher; what each says goes to ``logs/rankN.log``."""
    return [_start(f"rank{rank}", [module, *arguments], env, logs) for rank, env in enumerate(_ranks(num_ranks))]


def fork_ranks(forks: ForkServer, module: str, arguments: Sequence[str], num_ranks: int, logs: Path) -> list[Process]:
    """The same from a process that has imported the module, which takes each process five seconds."""
    logs.mkdir(parents=True, exist_ok=True)
    argv = (sys.executable, "-m", module, *arguments)
    started = [
        forks.start(argv, {**os.environ, **env}, logs / f"rank{rank}.log") for rank, env in enumerate(_ranks(num_ranks))
    ]
    found = [process for process in started if process is not None]
    assert len(found) == num_ranks, "the fork server has ended"
    return found


def _ranks(num_ranks: int) -> list[dict[str, str]]:
    """What the environment of each rank says."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**shared, "RANK": str(rank)} for rank in range(num_ranks)]


def start_torchruns(
    module: str, arguments: Sequence[str], num_nodes: int, ranks_per_node: int, logs: Path
) -> list[subprocess.Popen[bytes]]:
    """One torchrun for each "node", all on this machine; they say what they have to say to ``logs/nodeN.log``."""
    meeting = ["--standalone"]
    if num_nodes > 1:
        meeting = [f"--nnodes={num_nodes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    started = []
    for node in range(num_nodes):
        place = [f"--node-rank={node}"] if num_nodes > 1 else []
        torchrun = ["torch.distributed.run", *meeting, *place, f"--nproc-per-node={ranks_per_node}", "-m"]
        started.append(_start(f"node{node}", [*torchrun, module, *arguments], {}, logs))
    return started


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


def _start(name: str, arguments: Sequence[str], env: Mapping[str, str], logs: Path) -> subprocess.Popen[bytes]:
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=output,
            stderr=output,
        )


def run_processes(processes: Sequence[Process], logs: Path, timeout_s: float = RANKS_TIMEOUT_S) -> None:
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
