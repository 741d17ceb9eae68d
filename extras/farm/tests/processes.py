"""Gateways and workers as processes of their own, which tests may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client import channel
from tests.ports import free_port
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0


def children(pid: int) -> list[int]:
    """Of a process, the oldest first."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def serves_connection(pid: int, port: int) -> bool:
    """Whether a process holds an established connection on its local ``port``; no for one that ends meanwhile."""
    established = "01"  # the state's number in /proc/net/tcp
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == established}
        held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except (FileNotFoundError, ProcessLookupError):
        return False  # such as the script's own ``sleep``, or a file that was closed between the two looks
    return any(f"socket:[{inode}]" in held for inode in inodes)


class Process:
    """One of ours, a module of Python or a script; its output goes to a file."""

    def __init__(self, arguments: list[str], log: Path, **variables: str) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                arguments if arguments[0].endswith(".sh") else [sys.executable, "-m", *arguments],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables},
            )  # fmt: skip
        self.log = log
        self.pid = self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(WAIT_S)

    def wait(self) -> int:
        """For its own end; the exit code."""
        return self._process.wait(60)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()


class World:
    """A gateway's port, its Redis, and the processes that live at the moment."""

    def __init__(self, directory: Path, redis_uri: str) -> None:
        self._directory = directory
        self._redis_uri = redis_uri
        self.port = free_port()
        self.processes: list[Process] = []

    async def start_gateway(self, *settings: str) -> Process:
        gateway = self._started(
            ["services.envgateway", "--recipe", "recipes/quickstart", "--set", f"envgateway.port={self.port}",
             "--set", "envgateway.sandbox.allow_tier_0=true", "--set", "envgateway.sandbox.num_slots=1",
             "--set", "envgateway.sandbox.prewarm_scientific=false",
             *(part for setting in settings for part in ("--set", setting))],
            "gateway.log",
        )  # fmt: skip
        async with channel(f"127.0.0.1:{self.port}") as connection:
            status = status_pb2_grpc.StatusServiceStub(connection)
            await status.GetStatus(status_pb2.GetStatusRequest(), timeout=START_S, wait_for_ready=True)
        return gateway

    def start_worker(self, slots: int = 2, *settings: str) -> Process:
        return self._started(
            ["extras.farm", "--recipe", "recipes/quickstart", "--set", "envgateway.queue.lease_s=2",
             "--set", "envgateway.sandbox.prewarm_scientific=false",
             *(part for setting in settings for part in ("--set", setting))],
            f"worker{len(self.processes)}.log", MAX_WORKERS=str(slots), ALLOW_TIER_0="1",
        )  # fmt: skip

    async def gauges(self) -> dict[str, float]:
        async with channel(f"127.0.0.1:{self.port}") as connection:
            stub = status_pb2_grpc.StatusServiceStub(connection)
            answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=20, wait_for_ready=True)
            return dict(answer.gauges)

    def start_api(self, num_processes: int, http_port: int, **variables: str) -> Process:
        """Code Judge's interface, started as by the launch script."""
        return self._started(
            ["deploy/launch/judge_api.sh"], "api.log", API_PROCESSES=str(num_processes), ALLOW_TIER_0="1",
            CODE_JUDGE_PORT=str(http_port), ENVGATEWAY_PORT=str(self.port), **variables,
        )  # fmt: skip

    def close(self) -> None:
        for process in self.processes:
            process.end()

    def _started(self, arguments: list[str], log: str, **variables: str) -> Process:
        process = Process(arguments, self._directory / log, REDIS_URI=self._redis_uri, **variables)
        self.processes.append(process)
        return process
