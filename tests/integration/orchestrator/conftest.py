"""A real orchestrator process on a run directory of its own, and its scripted peers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from services.cli.run.processes import ForkServer
from services.common.config.loading import save_resolved, validate
from services.common.pb import run_pb2, run_pb2_grpc, status_pb2, status_pb2_grpc
from services.common.system.child import module_command
from services.common.system.processes import ChildProcess
from tests.ports import free_port
from tests.waiting import WAIT_S

Peers = list[ScriptedReplica | ScriptedTrainer]
READY_S = 90.0  # on a machine with much else to do


def recipe_tree(directory: Path, port: int, **changes: Any) -> dict[str, Any]:
    """A small run: 4 trajectories a task, batches of 16, 6 steps, no token older than one version. ``changes`` name
    dotted keys with '__'."""
    data = directory / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(20)))
    evaluation = directory / "evaluation.jsonl"
    evaluation.write_text("".join(json.dumps({"question": f"e{i}"}) + "\n" for i in range(5)))
    tree: dict[str, Any] = {
        "name": "scripted",
        "run": {"id": "scripted-test", "steps": 6, "seed": 1},
        "policies": {
            "model0": {
                "model": {"path": "none"},
                "batch": {"size": 16, "max_staleness": 1, "minibatches": 2, "late": "drop"},
            }
        },
        "data": {"train": {"path": str(data)}, "evaluation": {"held_out": {"path": str(evaluation)}}},
        "workflow": {"settings": {"reward": "services.inference.workflows.base:boxed_integer"}},  # reads no row here
        "rollout": {"group_size": 4},
        "orchestrator": {"port": port, "lease_s": 2.0, "min_free_bytes": 0},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    for key, value in changes.items():
        section = tree
        *path, last = key.split("__")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


class Orchestrator:
    """A process that can be killed and started again on the same port and directory."""

    def __init__(self, run_dir: Path, forks: ForkServer | None = None, **changes: Any) -> None:
        """Forked where a fork server is given, which saves a CPU second at each start."""
        self._forks = forks
        self.port = free_port()
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        tree = recipe_tree(run_dir, self.port, **changes)
        save_resolved(validate(tree, source="test"), run_dir)
        self.process: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spawn(self) -> ChildProcess:
        command = module_command("services.orchestrator", "--run-dir", str(self.run_dir))
        environment, log = {**os.environ, "OMP_NUM_THREADS": "1"}, self.run_dir / "stderr.txt"
        if self._forks is not None:
            process = self._forks.start(command, environment, log)
            assert process is not None, "the fork server has ended"
            return process
        with log.open("ab") as output:
            return subprocess.Popen(command, stderr=output, env=environment)

    async def start(self) -> None:
        self.process = self.spawn()
        # gRPC's own pause after a refused connection is 1 s: a short run ends within it.
        backoff = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
        async with grpc.aio.insecure_channel(self.address, backoff) as connection:
            stub = status_pb2_grpc.StatusServiceStub(connection)
            async with asyncio.timeout(READY_S):
                while True:
                    if (code := self.process.poll()) is not None:
                        assert code == 0, (self.run_dir / "stderr.txt").read_text()
                        return  # the rest of the run was shorter than the wait for this process
                    try:
                        status = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=2.0)
                        if status.state == "ready":
                            return
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.05)

    async def start_with(
        self, peers: Peers, *, latency_s: float | None = None, train_s: float = 0.0, replica_id: str = "a"
    ) -> tuple[ScriptedReplica, ScriptedTrainer]:
        """Start it, a replica that plays and a trainer that has not joined; ``peers`` close these two."""
        await self.start()
        rollouts = Rollouts() if latency_s is None else Rollouts(latency_s=latency_s)
        replica = ScriptedReplica(self.address, replica_id=replica_id, rollouts=rollouts)
        trainer = ScriptedTrainer(self.address, train_s=train_s)
        peers += [replica, trainer]
        replica.start()
        return replica, trainer

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)

    async def restart(self) -> None:
        self.kill()
        await self.start()

    async def wait(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout_s)

    async def progress(self) -> run_pb2.RunProgress:
        async with grpc.aio.insecure_channel(self.address) as connection:
            response = await run_pb2_grpc.RunServiceStub(connection).GetRun(run_pb2.GetRunRequest(), timeout=WAIT_S)
            return response.progress

    async def until(
        self, condition: Callable[[run_pb2.RunProgress], bool], timeout_s: float = WAIT_S
    ) -> run_pb2.RunProgress:
        async with asyncio.timeout(timeout_s):
            while not condition(now := await self.progress()):
                await asyncio.sleep(0.05)
            return now

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "metrics" / "orchestrator.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def close(self) -> None:
        if self.process is not None:
            self.kill()


@pytest.fixture
def orchestrators(tmp_path: Path, forks: ForkServer) -> Iterator[Callable[..., Orchestrator]]:
    """Makes orchestrators and ends their processes."""
    made: list[Orchestrator] = []

    def make(**changes: Any) -> Orchestrator:
        made.append(Orchestrator(tmp_path / f"run{len(made)}", forks, **changes))
        return made[-1]

    yield make
    for orchestrator in made:
        orchestrator.close()


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    """Peers put into this list are closed."""
    found: Peers = []
    yield found
    for peer in found:
        await peer.close()
