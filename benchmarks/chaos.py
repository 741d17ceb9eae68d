"""Is anything lost, done twice or computed otherwise when everything that can fail fails?

A small real run (orchestrator, gateway, trainer, publisher, replicas; a model of 0.36 M parameters whose rollouts call
the gateway) with ``run.deterministic`` goes through a seeded schedule of faults (``schedule``). Then its
journal is audited against the acknowledgements that replicas got, and the same run is made again without faults: every
version that both published must have the same digest. At last a run that is asynchronous, as runs are by default, is
played with a kill -9 of a replica every 10 s, in turn with stretches without.

    faults         done, by kind
    lost, twice    acknowledged slots and trained sequences without a record; slots, batches, sequences in batches, versions
                   that are there twice
    audit          other violations by rule (benchmarks/_journal_audit.py)
    bit_identical  every version of the faulty run has the digest of the run without faults; ``steps_compared``
    goodput        trained sequences per second with kills, as a share of those without
    resume_p95_s   by killed process, from the kill: the trainer until its next published version, the others until they serve; with medians
    stuck          faults after which the run did not go on; empty is good

    python benchmarks/chaos.py [--quick] [--minutes N | --hours N] [--seed N] [--kinds KIND ...] [--keep]

--quick takes a minute on two free cores, with few kinds of faults. Without an option: 15 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._bench import report_facts, why_not
from benchmarks._journal_audit import Findings, Rule, audit
from services.cli.plan import ProcessSpec, inference_process, orchestrator_address, plan, with_free_ports
from services.cli.run.processes import MODULES, WATCH_S, ForkServer, Processes
from services.cli.watch import OrchestratorClient
from services.common.config.loading import load_recipe, save_resolved
from services.common.errors import InfrastructureError, RollmillError
from services.common.pb import run_pb2
from services.common.rpc.client import is_serving
from services.common.system.child import module_command, module_in
from services.common.system.processes import ChildProcess
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row, segment_path

# --- The seeded schedule of ``chaos.py``: which fault comes next, at which process, and for how long. Pure.


class Kind(enum.StrEnum):
    """The kinds of faults."""

    KILL_TRAINER = "kill trainer"
    KILL_ORCHESTRATOR = "kill orchestrator"
    KILL_REPLICA = "kill replica"
    KILL_GATEWAY = "kill gateway"
    KILL_PUBLISHER = "kill publisher"
    STOP_REPLICA = "stop replica past its lease"
    STOP_TRAINER = "stop trainer past its lease"
    STOP_ORCHESTRATOR = "stop orchestrator past all leases"
    CUT_CONNECTIONS = "cut connections"
    HALF_OPEN = "half-open connections"
    LOSE_ORDERS = "lose the orchestrator's messages"
    FULL_DISK = "full disk"
    CLOCK_FORWARD = "clock jumps forward"
    CLOCK_BACK = "clock jumps back"
    CHURN = "replicas come and go"
    FLIP_SEGMENT = "flip a byte of the journal"
    FLIP_CHECKPOINT = "flip a byte of a checkpoint"
    FLIP_WEIGHTS = "flip a byte of weights in shared memory"


# In which something is measured come first in every deal: short runs need them.
MEASURED = (Kind.KILL_TRAINER, Kind.KILL_ORCHESTRATOR, Kind.KILL_REPLICA)


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the schedule. ``draw`` in [0, 1) chooses among the present replicas, bytes or records."""

    kind: Kind
    draw: float
    pause_s: float  # between the recovery from it and the next


def schedule(
    seed: int, kinds: Collection[Kind] = tuple(Kind), pauses_s: tuple[float, float] = (0.5, 2.0)
) -> Iterator[Fault]:
    """Faults without end; the same for the same seed and kinds."""
    rng = random.Random(seed)
    ordered = [kind for kind in Kind if kind in kinds]
    while True:
        first = [kind for kind in ordered if kind in MEASURED]
        rest = [kind for kind in ordered if kind not in MEASURED]
        rng.shuffle(first)
        rng.shuffle(rest)
        for kind in (*first, *rest):
            yield Fault(kind, rng.random(), rng.uniform(*pauses_s))


# --- A small real run for ``chaos.py``, with handles for its faults: every service as a process of its own, started,
# watched and started again by the launcher's own code.


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
        self._processes = Processes(self.run_dir, max_restarts=1_000_000, stop_grace_s=0.5, forks=forks)
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
        from benchmarks._bench import free_port

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


# --- The faults of ``chaos.py``: each method injects one kind into a ``World`` and measures the time to recovery.


T = TypeVar("T")
GOES_ON_S = 60.0  # a run that takes no step for so long after a fault is stuck
PAST_LEASE_S = LEASE_S + 1.5
FULL_S = 3.0
JUMP_S = 3600.0
GUESTS = 4  # that come at once; those of the time before leave


class Faults:
    """Does faults to one run, and measures. ``resumes``: seconds by the kind of process that was killed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.done: Counter[str] = Counter()
        self.resumes: dict[str, list[float]] = defaultdict(list)
        self.stuck: list[str] = []
        self._do: dict[Kind, Callable[[float], None]] = {
            Kind.KILL_TRAINER: self._kill_trainer,
            Kind.KILL_ORCHESTRATOR: self._kill_orchestrator,
            Kind.KILL_REPLICA: lambda draw: self._kill(chosen(self._world.replicas(), draw), "replica"),
            Kind.KILL_GATEWAY: lambda draw: self._kill("envgateway", "gateway"),
            Kind.KILL_PUBLISHER: self._kill_publisher,
            Kind.STOP_REPLICA: lambda draw: self._stop(chosen(self._world.replicas(), draw)),
            Kind.STOP_TRAINER: lambda draw: self._stop("trainer"),
            Kind.STOP_ORCHESTRATOR: lambda draw: self._stop("orchestrator"),
            Kind.CUT_CONNECTIONS: lambda draw: self._link("hold", 0.2),
            Kind.HALF_OPEN: lambda draw: self._link("hold", PAST_LEASE_S),
            Kind.LOSE_ORDERS: lambda draw: self._link("drop-down", 2.0),
            Kind.FULL_DISK: self._full_disk,
            Kind.CLOCK_FORWARD: lambda draw: self._jump(draw, JUMP_S),
            Kind.CLOCK_BACK: lambda draw: self._jump(draw, -JUMP_S),
            Kind.CHURN: self._churn,
            Kind.FLIP_SEGMENT: self._flip_segment,
            Kind.FLIP_CHECKPOINT: self._flip_checkpoint,
            Kind.FLIP_WEIGHTS: self._flip_weights,
        }

    def do(self, fault: Fault) -> bool:
        """Inject a fault, wait for the next step of the run, and for the pause of the schedule; False if the run does
        not continue."""
        try:
            self._do[fault.kind](fault.draw)
            self.done[fault.kind.value] += 1
            self._goes_on()
        except RuntimeError as error:
            self.stuck.append(f"{fault.kind.value}: {error}")
            return False
        time.sleep(fault.pause_s)
        return True

    # -- kills ----------------------------------------------------------------------------------------------------------

    def _kill_trainer(self, draw: float) -> None:
        """Training again: a version newer than the kill is published."""
        began = time.monotonic()
        self._world.send("trainer", signal.SIGKILL)
        self._goes_on()
        self.resumes["trainer"].append(time.monotonic() - began)

    def _kill_orchestrator(self, draw: float) -> None:
        """Serving again: the process answers status calls of a run."""
        world, began = self._world, time.monotonic()
        gone = world.send("orchestrator", signal.SIGKILL)
        world.wait_for(lambda: world.pid("orchestrator") != gone, GOES_ON_S, "the restart of the orchestrator")
        world.wait_for(lambda: world.progress() is not None, GOES_ON_S, "an answer of the orchestrator")
        self.resumes["orchestrator"].append(time.monotonic() - began)
        self._goes_on()
        self.resumes["training after a kill of the orchestrator"].append(time.monotonic() - began)

    def _kill(self, name: str, kind: str) -> None:
        """Serving again: its health service says so."""
        world, began = self._world, time.monotonic()
        gone = world.send(name, signal.SIGKILL)
        world.wait_for(lambda: world.pid(name) != gone, GOES_ON_S, f"the restart of {name}")
        world.wait_for(lambda: is_serving(world.address(name)), GOES_ON_S, f"the health of {name}")
        self.resumes[kind].append(time.monotonic() - began)

    def _kill_publisher(self, draw: float) -> None:
        self._world.send("publisher", signal.SIGKILL)

    def _stop(self, name: str) -> None:
        pid = self._world.send(name, signal.SIGSTOP)
        time.sleep(PAST_LEASE_S)
        os.kill(pid, signal.SIGCONT)

    # -- network, disk, clocks, members -----------------------------------------------------------------------------------

    def _link(self, mode: str, seconds: float) -> None:
        self._world.proxy(mode)
        time.sleep(seconds)
        self._world.proxy("pass")

    def _full_disk(self, draw: float) -> None:
        self._world.fill_disk()
        time.sleep(FULL_S)
        self._world.empty_disk()

    def _jump(self, draw: float, seconds: float) -> None:
        name = chosen(["orchestrator", "trainer", "envgateway", *self._world.replicas()], draw)
        self._world.jump(name, seconds)
        self._goes_on()
        self._world.jump(name, 0.0)

    def _churn(self, draw: float) -> None:
        old = [name for name in self._world.guests if name.startswith("guest")]
        for _ in range(GUESTS):
            self._world.invite()
        for name in old:
            self._world.dismiss(name)

    # -- flipped bytes ----------------------------------------------------------------------------------------------------

    def _flip_segment(self, draw: float) -> None:
        """In a trajectory that a run can do without: of a slot that can be played again, or trained before the oldest
        checkpoint."""
        world = self._world
        world.send("orchestrator", signal.SIGKILL)
        time.sleep(0.05)  # the last write is over
        journal = world.run_dir / "journal"
        row = chosen(_dispensable(journal, _oldest_checkpoint(world.run_dir)), draw)
        flip(segment_path(journal, row.kind, row.segment), draw, row.offset, row.length)

    def _flip_checkpoint(self, draw: float) -> None:
        """In the newest one, while an older one is there to fall back to."""
        kept = _checkpoints(self._world.run_dir)
        if len(kept) < 2:
            self._world.wait_for(lambda: len(_checkpoints(self._world.run_dir)) >= 2, GOES_ON_S, "a second checkpoint")
            kept = _checkpoints(self._world.run_dir)
        self._world.send("trainer", signal.SIGKILL)
        kept = _checkpoints(self._world.run_dir)
        flip(max(kept[-1].iterdir(), key=lambda file: file.stat().st_size), draw)

    def _flip_weights(self, draw: float) -> None:
        """In the newest snapshot, which a replica that starts again needs."""
        found = sorted(
            Path("/dev/shm").glob(f"*{self._world.recipe.run.id}*"), key=lambda file: file.stat().st_mtime_ns
        )
        if not found:
            raise RuntimeError("there are no weights in /dev/shm")
        with contextlib.suppress(FileNotFoundError):
            flip(found[-1], draw)
        self._world.send(chosen(self._world.replicas(), draw), signal.SIGKILL)

    def _goes_on(self) -> None:
        """Wait for a version newer than the one that there is now."""
        world = self._world
        newest = -2

        def answered() -> bool:
            nonlocal newest
            newest = world.version()
            return newest >= -1

        world.wait_for(answered, GOES_ON_S, "an answer of the orchestrator")
        world.wait_for(lambda: world.version() > newest, GOES_ON_S, f"a version after {newest}")


def chosen(among: Sequence[T], draw: float) -> T:
    return among[int(draw * len(among))]


def flip(file: Path, draw: float, offset: int = 0, length: int = 0) -> None:
    """Flip one bit of a file, or of a span of the file."""
    size = length or file.stat().st_size
    place = offset + int(draw * size)
    with file.open("r+b", buffering=0) as opened:
        byte = os.pread(opened.fileno(), 1, place)
        os.pwrite(opened.fileno(), bytes([byte[0] ^ 0x10]), place)


def _checkpoints(run_dir: Path) -> list[Path]:
    """Complete ones, oldest first."""
    return sorted(
        path for path in (run_dir / "checkpoints" / POLICY).glob("step_*") if path.name.removeprefix("step_").isdigit()
    )


def _oldest_checkpoint(run_dir: Path) -> int:
    return int(found[0].name.removeprefix("step_")) if (found := _checkpoints(run_dir)) else 0


def _dispensable(journal: Path, oldest_checkpoint: int) -> list[Row]:
    reader = JournalReader(journal)
    try:
        needed = {
            entry["sequence_id"].rpartition("/")[0]
            for row in reader.rows_of(entries.BATCH)
            if int(row.key.rpartition("/")[2]) > oldest_checkpoint and (record := reader.load(row)) is not None
            for entry in record["sequences"]
        }
        rows = [row for row in reader.rows_of(entries.TRAJECTORY) if row.key not in needed]
    finally:
        reader.close()
    if not rows:
        raise RuntimeError("the journal has no trajectory that the run can do without")
    return rows


# --- The benchmark itself.


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
DETERMINISTIC = [
    "run.deterministic=true",
    f"policies.{POLICY}.batch.size=16",
    f"policies.{POLICY}.batch.max_staleness=0",
    f"policies.{POLICY}.trainer.checkpoint_every=3",
    f"policies.{POLICY}.trainer.keep_checkpoints=3",
    "inference={a: {port: 0, engine: torch, num_slots: 8, device: cpu}, b: {port: 0, engine: torch, num_slots: 8, device: cpu}}",
]
ASYNCHRONOUS = [
    f"policies.{POLICY}.batch.size=32",
    f"policies.{POLICY}.batch.max_staleness=2",
    "inference={"
    + ", ".join(f"{name}: {{port: 0, engine: torch, num_slots: 16, device: cpu}}" for name in "abc")
    + "}",
]
KILL_EVERY_S = 10.0
WARM_UP_STEPS = 3
QUICK_KINDS = (
    Kind.KILL_TRAINER, Kind.KILL_ORCHESTRATOR, Kind.KILL_REPLICA, Kind.KILL_PUBLISHER, Kind.CUT_CONNECTIONS, Kind.CLOCK_FORWARD,
)  # fmt: skip
WARM_START = ["warm_start.model0.steps=2", "warm_start.model0.batch_size=32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute, with a few kinds of faults")
    parser.add_argument("--minutes", type=float, default=15.0, help="all in all; about half of it with faults")
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the run")
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of faults, such as 'kill trainer'; left out, all")
    parser.add_argument("--keep", action="store_true", help="leave the run directories")
    options = parser.parse_args()
    seconds = 60.0 if options.quick else 60.0 * (60.0 * options.hours or options.minutes)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    forks = fork_server(folder)
    try:
        facts = _measure(folder, forks, options, seconds)
    finally:
        forks.stop()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    report_facts("chaos", seed=options.seed, **facts)


def _measure(folder: Path, forks: ForkServer, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    started_from = [f"policies.{POLICY}.model.path={_starting_checkpoint(folder)}", f"run.seed={options.seed}"]
    no_tmpfs = why_not("tmpfs")
    wanted = {Kind(kind) for kind in options.kinds} or set(QUICK_KINDS if options.quick else Kind)
    kinds = wanted - ({Kind.FULL_DISK} if no_tmpfs else set())
    disk_mib = 0 if no_tmpfs else DISK_MIB + int(seconds / 3600 * DISK_MIB_PER_HOUR)
    stormy = World(folder, "stormy", forks, [*started_from, *DETERMINISTIC], disk_mib=disk_mib)
    try:
        faults, found, digests = _storm(stormy, options.seed, kinds, (0.2 if options.quick else 0.35) * seconds)
    finally:
        stormy.unmount(options.keep)
    calm = World(folder, "calm", forks, [*started_from, *DETERMINISTIC])
    undisturbed = _calm(calm, max(digests, default=0), max(600.0, seconds))
    common = digests.keys() & undisturbed.keys()
    differ = sorted(number for number in common if digests[number] != undisturbed[number])
    busy = World(folder, "busy", forks, [*started_from, *ASYNCHRONOUS])
    goodput = _goodput(
        busy, rounds=1 if options.quick else max(1, int(seconds / 240)), calm_s=8.0 if options.quick else 40.0
    )
    rules = {rule.value: texts for rule, texts in found.violations.items() if rule not in (Rule.LOST, Rule.TWICE)}
    return {
        "faults": dict(faults.done),
        "num_faults": sum(faults.done.values()),
        "lost": len(found.violations[Rule.LOST]),
        "twice": len(found.violations[Rule.TWICE]),
        "audit": {name: len(texts) for name, texts in rules.items()},
        "bit_identical": bool(common) and not differ and max(digests) in common,
        "steps_compared": len(common),
        "first_difference": differ[0] if differ else None,
        **goodput,
        "resume_p95_s": {kind: _percentile(values, 0.95) for kind, values in faults.resumes.items()},
        "resume_median_s": {kind: _percentile(values, 0.5) for kind, values in faults.resumes.items()},
        "slots": found.num_slots,
        "replicas_ever": stormy.num_replicas_ever,
        "excused": found.num_excused,
        "stuck": faults.stuck,
        "violations": [text for texts in found.violations.values() for text in texts[:3]],
        "left_out": {Kind.FULL_DISK.value: no_tmpfs} if no_tmpfs and Kind.FULL_DISK in wanted else {},
    }


def _starting_checkpoint(folder: Path) -> Path:
    """A model that has been trained for a moment, once for all runs."""
    from services.trainer.warm_start import make_starting_checkpoint

    recipe = load_recipe(ROOT / "recipes" / "quickstart", WARM_START, {})
    make_starting_checkpoint(recipe, POLICY, folder)
    return folder / "warm_start" / POLICY


def _storm(world: World, seed: int, kinds: Iterable[Kind], seconds: float) -> tuple[Faults, Findings, dict[int, str]]:
    """The run with faults, audited: the faults, the findings, and the digests of its versions."""
    faults = Faults(world)
    try:
        world.start()
        world.invite(FAR, world.start_proxy())
        world.wait_for(lambda: world.version() >= WARM_UP_STEPS, 120.0, "the first steps")
        until = time.monotonic() + seconds
        for fault in schedule(seed, tuple(kinds)):
            went_on = faults.do(fault)
            sys.stderr.write(f"{fault.kind.value}: {'goes on' if went_on else faults.stuck[-1]}\n")
            if not went_on or time.monotonic() > until:
                break
    except RuntimeError as error:
        faults.stuck.append(str(error))
    finally:
        world.close()
    reader = JournalReader(world.run_dir / "journal")
    try:
        return faults, audit(reader, world.acknowledged()), _digests(reader)
    finally:
        reader.close()


def _calm(world: World, version: int, limit_s: float) -> dict[int, str]:
    """The same run without faults, as far as the other one went."""
    try:
        world.start()
        world.wait_for(lambda: world.version() >= version, limit_s, f"version {version}")
    finally:
        world.close()
    reader = JournalReader(world.run_dir / "journal")
    try:
        return _digests(reader)
    finally:
        reader.close()


def _goodput(world: World, rounds: int, calm_s: float) -> dict[str, float]:
    """Trained sequences per second, in turn without and with a kill -9 of a replica every 10 s, in one run."""
    calm: list[tuple[float, float]] = []
    killed: list[tuple[float, float]] = []
    kills = 0
    try:
        world.start()
        world.wait_for(lambda: world.version() >= WARM_UP_STEPS, 120.0, "the first steps")
        for _ in range(rounds):
            calm.append(_stretch(calm_s / 2))  # before and after: what else the machine does changes
            began, disturbed_s = time.time(), max(KILL_EVERY_S, calm_s // KILL_EVERY_S * KILL_EVERY_S)
            while time.time() - began < disturbed_s - 0.1:
                replicas = world.replicas()
                world.send(replicas[kills % len(replicas)], 9)
                kills += 1
                _stretch(KILL_EVERY_S)
            killed.append((began, time.time()))
            time.sleep(1.0)
            calm.append(_stretch(calm_s / 2))
    finally:
        world.close()
    rows = [json.loads(line) for line in (world.run_dir / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    steps = [(row["time"], row["num_sequences"]) for row in rows if row["kind"] == "training_step"]
    with_kills, without = _rate(steps, killed), _rate(steps, calm)
    return {
        "goodput": with_kills / without if without else 0.0,
        "sequences_per_s": without,
        "sequences_per_s_with_kills": with_kills,
        "kills": kills,
    }


def _stretch(seconds: float) -> tuple[float, float]:
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


def _rate(steps: list[tuple[float, float]], stretches: list[tuple[float, float]]) -> float:
    trained = sum(count for at, count in steps if any(begin <= at < end for begin, end in stretches))
    return trained / sum(end - begin for begin, end in stretches)


def _digests(reader: JournalReader) -> dict[int, str]:
    found = {}
    for row in reader.rows_of(entries.VERSION):
        if (record := reader.load(row)) is not None:
            found[int(record["number"])] = str(record["digest"])
    return found


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
