"""Small runs of real processes that ``stalls.py`` injects stalls into: the parts of each, and how each is started.

An orchestrator, a replica with the scripted engine, where asked a gateway (with Redis and a worker), a stand-in or a
real trainer with two ranks and its publisher; proxies where bytes are to be lost on the way. No launcher: no process is
restarted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.plan import warm_start_commands
from services.cli.watch import OrchestratorClient
from services.common.config.loading import save_resolved, validate
from services.common.errors import RollmillError
from services.common.pb import run_pb2
from tests.needs import installed

READY_S = 240.0  # most of it importing, on two slow cores beside five other worlds
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The parts of a world."""

    name: str
    gateway: bool = False
    redis: bool = False
    ranks: int = 0  # of a real trainer; 0 is a stand-in
    proxied: tuple[str, ...] = ()  # "orchestrator", "gateway": what the replica reaches through a proxy
    small_disk: bool = False  # the run directory on a tmpfs of its own
    settings: dict[str, Any] = field(default_factory=dict)  # over the recipe
    tokens_per_s: float = 2000.0
    latency_s: float = 0.02
    reward_s: float = 0.01
    train_s: float = 0.2


class World:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.folder = Path(tempfile.mkdtemp(prefix=f"stalls-{shape.name}-"))
        self.run_dir = self.folder / "run"
        self.switches = self.folder / "switches"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        names = ("orchestrator", "gateway", "gateway-proxy", "proxy", "redis")
        self.ports = {name: _own_port() for name in names}
        self.run_dir.mkdir()
        self.switches.mkdir()
        if shape.small_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(self.run_dir)], check=True)
        self.client = OrchestratorClient(f"127.0.0.1:{self.ports['orchestrator']}")

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        recipe = validate(self._tree(), source=self.shape.name)
        save_resolved(recipe, self.run_dir)
        for spec in warm_start_commands(recipe, self.run_dir):
            subprocess.run(spec.argv, cwd=ROOT, env=self._environment(), check=True, capture_output=True)
        self._spawn("orchestrator", "services.orchestrator", "--run-dir", str(self.run_dir))
        dialled = self.ports["orchestrator"]
        if "orchestrator" in self.shape.proxied:
            dialled = self.ports["proxy"]
            self._proxy("orchestrator", dialled, self.ports["orchestrator"])
        if self.shape.redis:
            program = installed("redis-server")
            assert program is not None, f"the world {self.shape.name} needs a redis-server"
            self._spawn_program(
                "redis", program, "--port", str(self.ports["redis"]), "--save", "", "--dir", str(self.folder)
            )
            self._spawn("worker", "extras.farm", "--run-dir", str(self.run_dir))
        if self.shape.gateway:
            self._spawn("gateway", "services.envgateway", *self._gateway_arguments())
        self._spawn("inference", "services.inference", "--name", "a", "--orchestrator", f"127.0.0.1:{dialled}")
        address = f"127.0.0.1:{self.ports['orchestrator']}"
        if self.shape.ranks:
            module = ["services.trainer"]
            if self.shape.ranks > 1:
                module = ["services.trainer.launch_ranks", f"--num-ranks={self.shape.ranks}"]
            self._spawn(
                "trainer", *module, "--policy", "model0", "--orchestrator", address, "--run-dir", str(self.run_dir)
            )
        else:
            self._spawn_program(
                "trainer", sys.executable, str(HERE / "stalls.py"), "--trainer", f"{address}/{self.shape.train_s}"
            )

    def wait_until_healthy(self, versions: int = 3, seconds: float = 9.0) -> set[tuple[str, str]]:
        """So many versions and seconds into the run, without a stall: the detector has learnt the normal times.

        Returns the stalls reported meanwhile.
        """
        deadline, since = time.monotonic() + READY_S, None
        told: set[tuple[str, str]] = set()
        while True:
            progress = self.progress()
            version = progress.policies[0].version if progress is not None else -1
            told |= {(s.component, s.cause) for s in progress.stalls} if progress is not None else set()
            if progress is None or version < versions or progress.stalls:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > seconds:
                return told
            if time.monotonic() > deadline:
                stalls = [f"{s.component} {s.cause}" for s in progress.stalls] if progress is not None else "no answer"
                raise RuntimeError(
                    f"world {self.shape.name} is not healthy: version {version}, {stalls}; {self.folder}"
                )
            time.sleep(0.25)

    def progress(self) -> run_pb2.RunProgress | None:
        try:
            return self.client.get_run().progress
        except RollmillError:
            return None

    def close(self, keep: bool = False) -> None:
        self.client.close()
        started = [pid for process in self.processes.values() for pid, _, _ in _below(process.pid)]
        for pid in [process.pid for process in self.processes.values()] + started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # stopped ones, too
        for process in self.processes.values():
            process.wait(10)
        if self.shape.small_disk:
            subprocess.run(["umount", "-l", str(self.run_dir)], check=False)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- handles for injections --------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Of a process, or "rank0", "rank1" and "publisher" below the trainer."""
        if name in self.processes:
            return self.processes[name].pid
        for pid, words, environment in _below(self.processes["trainer"].pid):
            if name == "publisher" and "services.trainer.publisher" in words:
                return pid
            is_rank = "services.trainer" in words and "services.trainer.publisher" not in words
            if is_rank and environment.get("RANK", "") == name.removeprefix("rank"):
                return pid
        raise RuntimeError(f"no process {name} in {self.shape.name}")

    def send(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def switch(self, name: str, on: bool) -> None:
        path = self.switches / name
        path.touch() if on else path.unlink(missing_ok=True)

    def proxy(self, which: str, mode: str) -> None:
        (self.folder / f"proxy-{which}").write_text(mode)

    def fill_disk(self) -> None:
        block = b"\0" * (1 << 20)
        try:
            with (self.run_dir / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(block)
        except OSError:
            return

    def empty_disk(self) -> None:
        (self.run_dir / "filler").unlink(missing_ok=True)

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "STALL_SWITCHES": str(self.switches),
            "STALL_REWARD_S": str(self.shape.reward_s),
        }

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        self._spawn_program(name, sys.executable, "-m", module, *arguments)

    def _spawn_program(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                argv, cwd=ROOT, env=self._environment(), stdout=output, stderr=output, start_new_session=True
            )

    def _proxy(self, which: str, listen: int, target: int) -> None:
        mode = self.folder / f"proxy-{which}"
        self._spawn_program(
            f"proxy-{which}", sys.executable, str(HERE / "_stall_proxy.py"), str(listen), str(target), str(mode)
        )

    def _gateway_arguments(self) -> list[str]:
        if "gateway" not in self.shape.proxied:
            return ["--run-dir", str(self.run_dir)]
        self._proxy("gateway", self.ports["gateway-proxy"], self.ports["gateway"])
        return ["--recipe", str(self.run_dir / "recipe.json"), "--set", f"envgateway.port={self.ports['gateway']}"]

    def _tree(self) -> dict[str, Any]:
        data = self.folder / "tasks.jsonl"
        data.write_text(
            "".join(json.dumps({"question": f"{row} + {row}", "answer": str(2 * row)}) + "\n" for row in range(4))
        )
        gateway_port = self.ports["gateway-proxy" if "gateway" in self.shape.proxied else "gateway"]
        tree: dict[str, Any] = {
            "name": f"stalls-{self.shape.name}",
            "run": {"id": self.shape.name, "steps": 1_000_000},
            "policies": {
                "model0": {
                    "model": {"path": "none", "context_length": 512},
                    "batch": {"size": 16, "max_staleness": 2, "dynamic_sampling": False},
                    "trainer": {
                        "port": 0,
                        "device": "cpu",
                        "checkpoint_every": 1000,
                        "num_ranks": max(self.shape.ranks, 1),
                    },
                    "weights": {"port": 0, "publish_dtype": "float32"},
                }
            },
            "workflow": {
                "name": "benchmarks._stall_hooks:Hooked",
                "settings": {"programs_each": 1 if self.shape.gateway else 0},
            },
            "data": {"train": {"path": str(data)}},
            "sampling": {"max_new_tokens": 24},
            "evaluation": {"at_start": False, "at_end": False},
            "rollout": {"group_size": 4, "timeout_s": 120.0},
            "orchestrator": {"port": self.ports["orchestrator"], "min_free_bytes": 4 << 20},
            "inference": {
                "a": {
                    "engine": "scripted",
                    "port": 0,
                    "num_slots": 8,
                    "scripted": {
                        "tokens_per_s": self.shape.tokens_per_s,
                        "latency_s": self.shape.latency_s,
                    },
                }
            },
            "envgateway": None,
        }
        if self.shape.gateway:
            tree["envgateway"] = {
                "port": gateway_port,
                "sandbox": {"num_slots": 2, "wall_time_s": 40.0, "allow_tier_0": True},  # the programs are ours
                "queue": {"redis_uri": f"redis://127.0.0.1:{self.ports['redis']}", "lease_s": 4.0}
                if self.shape.redis
                else {},
            }
        if self.shape.ranks:
            tree["policies"]["model0"]["model"] = {"context_length": 128}
            tree["warm_start"] = {"model0": {"builder": "recipes.quickstart.model:build", "steps": 0}}
            tree["inference"]["a"] |= {"engine": "torch", "device": "cpu"}
        return _merged(tree, self.shape.settings)


_GIVEN: set[int] = set()  # to a world of this process, whether it has taken it yet or not


def _own_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


def _merged(tree: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        tree[key] = _merged(tree.get(key) or {}, value) if isinstance(value, dict) else value
    return tree


def _below(root: int) -> list[tuple[int, list[str], dict[str, str]]]:
    """(pid, words, environment) of all that a process has started, directly or not; torchrun's ranks are no session of its."""
    parents, found = {root}, []
    for entry in sorted((e for e in Path("/proc").iterdir() if e.name.isdigit()), key=lambda e: int(e.name)):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) not in parents:
                continue
            parents.add(int(entry.name))
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found.append((int(entry.name), words, dict(pair.partition("=")[::2] for pair in pairs)))
    return found


Step = Callable[[World], None]
