"""A small real run for ``chaos.py``, with handles for its faults: every service as a process of its own, started,
watched and started again by the launcher's own code.

    orchestrator, gateway, trainer with its publisher, replicas a and b  <- launcher's plan and ``Processes``
    replica far, behind a TCP proxy; replicas that come and go           <- beside it, from the same fork server

The run directory lies on a small tmpfs where the machine grants one. The schedule of faults is elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from services.cli.plan import ProcessSpec, inference_process, orchestrator_address, plan, with_free_ports
from services.cli.run.processes import MODULES, WATCH_S, ForkServer, Processes
from services.cli.watch import OrchestratorClient
from services.common.config.loading import load_recipe, save_resolved
from services.common.errors import InfrastructureError, RollmillError
from services.common.pb import run_pb2
from services.common.system.child import module_command, module_in
from services.common.system.processes import ChildProcess

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
POLICY = "model0"
READY_S = 120.0
DISK_MIB, DISK_MIB_PER_HOUR = 256, 96  # of journal, logs and metrics, which all stay
LEASE_S = 5.0
FAR = "far"

SMALL = [
    f"policies.{POLICY}.optimizer.schedule=constant",
    f"policies.{POLICY}.batch.dynamic_sampling=false",
    f"policies.{POLICY}.trainer.export_final=false",
    "run.steps=1000000",
    "run.until=null",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "warm_start={}",
    "workflow.settings.reward=benchmarks._chaos_hooks:share_of_digits",
    "rollout.infra_retries=9",
    f"orchestrator.lease_s={LEASE_S}",
    "orchestrator.min_free_bytes=4000000",
    "orchestrator.retention=all",
    "launch.restarts=1000000",
]


def fork_server(folder: Path) -> ForkServer:
    """With the hooks of this benchmark in its forks; for several runs, one after the other."""
    modules = [*MODULES, "benchmarks._chaos_hooks"]
    return ForkServer(folder / "fork-server.stderr", modules, {"CHAOS_HOOKS": "1", "PYTHONPATH": str(ROOT)})


class World:
    """One run. ``start`` returns when the run is ready; ``close`` ends all its processes."""

    def __init__(self, folder: Path, name: str, forks: ForkServer, settings: list[str], *, disk_mib: int = 0) -> None:
        """``disk_mib``: of a small disk for the run's directory; 0 keeps ``folder``."""
        self.folder = folder / name
        self.run_dir = self.folder / "run"
        self.acks, self.clocks = self.folder / "acks", self.folder / "clocks"
        for place in (self.run_dir, self.acks, self.clocks):
            place.mkdir(parents=True)
        self.small_disk = disk_mib > 0
        if self.small_disk:
            size = f"size={disk_mib}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.run_dir)], check=True)
        overrides = [*SMALL, f"run.dir={self.folder}", f"run.id=chaos-{name}", *settings]
        self.recipe = with_free_ports(load_recipe(ROOT / "recipes" / "quickstart", overrides))
        save_resolved(self.recipe, self.run_dir)
        self.environment = {
            "CHAOS_ACKS": str(self.acks),
            "CHAOS_CLOCKS": str(self.clocks),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._forks = forks
        self._processes = Processes(self.run_dir, max_restarts=1_000_000, stop_grace_s=0.5)
        self._processes.fork_where_possible(forks)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._proxy: subprocess.Popen[bytes] | None = None
        self.guests: dict[str, ChildProcess] = {}
        self._guests_ever = 0
        self.died: list[str] = []  # what ended otherwise than by the faults
        self.client = OrchestratorClient(orchestrator_address(self.recipe))

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for spec in sorted(plan(self.recipe, self.run_dir), key=lambda spec: spec.forked):
            self._processes.start(self._hooked(spec))
        self._watcher.start()
        self.wait_for(lambda: self.version() >= 0, READY_S, "the first version")

    def _hooked(self, spec: ProcessSpec) -> ProcessSpec:
        # In the fork server the hooks are installed, and nothing happens when they are again.
        module, arguments = module_in(spec.argv)
        hooked = module_command("benchmarks._chaos_hooks", module, *arguments)
        argv = spec.argv if spec.forked else hooked
        return replace(spec, argv=argv, env={**spec.env, **self.environment})

    def _watch(self) -> None:
        """The work of the launcher while following a run, at the same interval."""
        while not self._stopping.wait(WATCH_S):
            with self._lock:
                try:
                    self._processes.bring_back(self._processes.watch())
                except InfrastructureError as error:
                    self.died.append(error.message)
                    return

    def close(self) -> None:
        self._stopping.set()
        self._watcher.join(30)
        for pid in [*self._processes.pids().values(), *(guest.pid for guest in self.guests.values())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for guest in self.guests.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(guest.pid, signal.SIGKILL)
        self._processes.stop()
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait(10)
        self.client.close()

    def unmount(self, keep: bool) -> None:
        """Remove the small disk; ``keep`` leaves a copy of the run next to the mount."""
        if self.small_disk:
            if keep:
                shutil.copytree(self.run_dir, self.folder / "kept")
            subprocess.run(["umount", "-l", str(self.run_dir)], check=False)

    # -- what it says -------------------------------------------------------------------------------------------------

    def progress(self) -> run_pb2.RunProgress | None:
        """None while the orchestrator does not answer."""
        try:
            return self.client.get_run().progress
        except RollmillError:
            return None

    def version(self) -> int:
        found = self.progress()
        return found.policies[0].version if found is not None else -2

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Seconds until the condition held; raises ``RuntimeError`` with the name of the condition."""
        began = time.monotonic()
        while not condition():
            if self.died:
                raise RuntimeError(f"{what}: {self.died[0]}")
            if (waited := time.monotonic() - began) > timeout_s:
                raise RuntimeError(f"{what} did not happen within {waited:.0f} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def acknowledged(self) -> set[str]:
        """Slots with acknowledged records, also of replicas that have ended."""
        return {line for file in self.acks.iterdir() for line in file.read_text().splitlines()}

    # -- handles ------------------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Of ``orchestrator``, ``envgateway``, ``trainer``, ``publisher``, ``inference-NAME`` or a guest."""
        if name in self.guests:
            return self.guests[name].pid
        with self._lock:
            pids = self._processes.pids()
        if name == "publisher":
            return next(self._children(pids[f"trainer-{POLICY}"]))
        return pids[f"trainer-{POLICY}" if name == "trainer" else name]

    def address(self, name: str) -> str:
        """Where the health service of ``envgateway`` or ``inference-NAME`` answers."""
        section = self.recipe.envgateway if name == "envgateway" else self.recipe.inference[name.partition("-")[2]]
        assert section is not None
        return f"127.0.0.1:{section.port}"

    @property
    def num_replicas_ever(self) -> int:
        return len(self.recipe.inference) + self._guests_ever

    def send(self, name: str, number: signal.Signals) -> int:
        """Signal a process; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def replicas(self) -> list[str]:
        """Those that the launcher watches."""
        with self._lock:
            return sorted(name for name in self._processes.pids() if name.startswith("inference-"))

    def invite(self, name: str = "", orchestrator: str = "") -> str:
        """Start one more replica beside the launcher's; returns its name."""
        self._guests_ever += 1
        name = name or f"guest{self._guests_ever}"
        address = orchestrator or orchestrator_address(self.recipe)
        spec = inference_process(self.recipe, "a", address, "--replica-id", name, "--port", "0")
        environment = {**os.environ, **spec.env, **self.environment, "ROLLMILL_DIE_WITH_PARENT": str(os.getpid())}
        started = self._forks.start(spec.argv, environment, self.run_dir / "logs" / f"{name}.stderr")
        if started is None:
            raise RuntimeError("the fork server is gone")
        self.guests[name] = started
        return name

    def dismiss(self, name: str) -> None:
        """kill -9 an invited replica. The launcher's code removes the rest."""
        guest = self.guests.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(guest.pid, signal.SIGKILL)

    def start_proxy(self) -> str:
        """A proxy in front of the orchestrator; returns its address."""
        from benchmarks._processes import free_port

        port, target = free_port(), self.recipe.orchestrator.port
        command = [sys.executable, str(HERE / "_stall_proxy.py"), str(port), str(target), str(self.folder / "proxy")]
        self._proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return f"127.0.0.1:{port}"

    def proxy(self, mode: str) -> None:
        """A mode of ``_stall_proxy.py``; going back to ``pass`` closes its connections."""
        (self.folder / "proxy").write_text(mode)

    def jump(self, name: str, seconds: float) -> None:
        (self.clocks / str(self.pid(name))).write_text(str(seconds))

    def fill_disk(self) -> None:
        block = bytes(1 << 16)
        with (
            contextlib.suppress(OSError),
            (self.run_dir / "filler").open("wb", buffering=0) as file,
        ):
            while True:
                file.write(block)

    def empty_disk(self) -> None:
        (self.run_dir / "filler").unlink(missing_ok=True)

    @staticmethod
    def _children(pid: int) -> Iterator[int]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield from map(int, (task / "children").read_text().split())
