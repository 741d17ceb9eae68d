"""The services of a run as processes on this machine, with a run's keys or plain. Shared by benchmarks and tests.

An orchestrator with a recipe of scripted rollouts, an inference service with the scripted engine and an endpoint, a weight
publisher that offers one version, and a gateway with its HTTP interfaces. Their output goes to files beside the recipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks._bench import ROOT, free_port
from benchmarks._peers import ScriptedTrainer
from benchmarks._weight_versions import POLICY, RUN, VersionMaker, model_specs
from services.cli.keys import Keyring
from services.common.config.loading import save_resolved, validate
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client import channel
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role

READY_S = 60.0
WEIGHTS_BYTES = 8 << 20  # enough for the bulk plane to be offered

_GROUPS = ("endpoint", "judge", "task_server", "metrics")  # of HTTP routes; the metrics are the orchestrator's
_MODULES = {
    "orchestrator": ("services.orchestrator", "--run-dir={folder}"),
    "envgateway": ("services.envgateway", "--run-dir={folder}"),
    "publisher": (
        "services.trainer.publisher",
        f'{{{{"run_id": "{RUN}", "policy": "{POLICY}", "port": {{port}}, "run_dir": "{{folder}}"}}}}',
    ),
    "inference": ("services.inference", "--orchestrator={orchestrator}", "--name=a", "--replica-id=healthy"),
}  # fmt: skip


@dataclass(slots=True)
class Services:
    """``started`` makes one; ``addresses`` and ``processes`` by service, ``http`` by group of routes."""

    folder: Path
    keys: Keyring | None = None
    names: Sequence[str] = tuple(_MODULES)
    weights_bytes: int = WEIGHTS_BYTES
    digest: str = ""  # of the version that the publisher offers
    addresses: dict[str, str] = field(default_factory=dict)
    http: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def holding(self, role: Role) -> identity.Identity | None:
        """The holder of the keys of a role; None without keys."""
        if self.keys is None:
            return None
        return identity.load(self.keys.folder / "trainer" if role is Role.PUBLISHER else self.keys.folder, role)

    async def start(self) -> None:
        """Returns when every service reports readiness."""
        ports = {name: free_port() for name in (*_MODULES, *_GROUPS)}
        self.addresses = {name: f"127.0.0.1:{ports[name]}" for name in self.names}
        self.http = {name: f"127.0.0.1:{ports[name]}" for name in _GROUPS}
        save_resolved(validate(_recipe(self.folder, ports), source="the benchmark"), self.folder)
        for name in self.names:
            self._spawn(name, ports)
            if name == "publisher":
                self._offer_weights()
            if name == "orchestrator":  # the first version has to be there before a replica takes work
                await self._ready(name)
                await self._publish()
        await asyncio.gather(*map(self._ready, self.names))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)
            if process.stdin is not None:
                process.stdin.close()

    def _spawn(self, name: str, ports: dict[str, int]) -> None:
        module, *options = _MODULES[name]
        words = {"folder": self.folder, "port": ports[name], "orchestrator": self.addresses.get("orchestrator", "")}
        keys = {VARIABLE: str(self.keys.folder / ("trainer" if name == "publisher" else ""))} if self.keys else {}
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
        with (self.folder / f"{name}.out").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *(option.format(**words) for option in options)],
                env={**environment, **keys, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    async def _ready(self, name: str) -> None:
        end = time.monotonic() + READY_S
        with identity.used(self.holding(Role.OPERATOR)):
            connection = channel(self.addresses[name])
        async with connection:
            stub = status_pb2_grpc.StatusServiceStub(connection)
            while True:
                assert self.processes[name].poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
                try:
                    status = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=5.0)
                    if status.state == "ready":
                        return
                except grpc.aio.AioRpcError as error:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{name} did not get ready: {error.details()}") from None
                await asyncio.sleep(0.1)

    async def _publish(self) -> None:
        with identity.used(self.holding(Role.TRAINER)):
            trainer = ScriptedTrainer(self.addresses["orchestrator"])
        await trainer.join()
        await trainer.publish(0)
        await trainer.close()

    def _offer_weights(self) -> None:
        path, manifest = VersionMaker(model_specs(self.weights_bytes), self.folder, seed=1).write()
        self.digest = manifest.digest
        pipe = self.processes["publisher"].stdin
        assert pipe is not None
        pipe.write(json.dumps({"add": str(path)}).encode() + b"\n")
        pipe.flush()


@contextmanager
def prepared(folder: Path, **settings: Any) -> Iterator[Services]:
    """Services to ``start``; their processes end with the block."""
    services = Services(folder, **settings)
    try:
        yield services
    finally:
        services.close()


def _recipe(folder: Path, ports: dict[str, int]) -> dict[str, Any]:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": "1"}) + "\n" for row in range(1000)))
    return {
        "name": "doors",
        "run": {"id": RUN, "steps": 100_000, "seed": 1},
        "policies": {POLICY: {"model": {"path": "none"}, "batch": {"size": 64, "max_staleness": 2}}},
        "data": {"train": {"path": str(data)}, "evaluation": {"held_out": {"path": str(data)}}},
        "rollout": {"group_size": 4},
        "orchestrator": {"port": ports["orchestrator"], "min_free_bytes": 0},
        "metrics": {"enabled": True, "ports": {"orchestrator": ports["metrics"]}},
        "inference": {
            "a": {"engine": "scripted", "port": ports["inference"], "endpoint": {"port": ports["endpoint"]}}
        },
        "envgateway": {
            "port": ports["envgateway"],
            "http": {"port": ports["judge"]},
            "task_server": {"port": ports["task_server"], "environments": {"household_toy": {"end": 10}}},
            "sandbox": {
                "num_slots": 2, "num_live": 2, "wall_time_s": 1.0, "prewarm_scientific": False, "allow_tier_0": True,
            },
        },
    }  # fmt: skip
