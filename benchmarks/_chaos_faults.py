"""The faults of ``chaos.py``: each method injects one kind into a ``World`` and measures the time to recovery."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks._chaos_schedule import Fault, Kind
from benchmarks._chaos_world import LEASE_S, POLICY, World
from services.common.rpc.client import is_serving
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row, segment_path

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
