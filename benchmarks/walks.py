"""Counts the files and functions that a reader opens to follow one action through the system, for four walks.

The script runs a cut-down quickstart with `rollmill run`: real processes, real gRPC, a replay engine. `sys.setprofile` and
`threading.setprofile` record every call of a function of `services/` in the orchestrator, the replica, the trainer and the
weight publisher (benchmarks/_walk_hooks.py, which a `sitecustomize` in PYTHONPATH imports; services have no hook for this).

    walk            begins with                                         ends with
    task_dispatch   call of Dispatcher.pump that issues a task group    call of RolloutPlayer.play in the replica
    engine_journal  return of TorchEngine.generate, last of a rollout   return of Journal._transaction, record on the disk
    pull_gradient   call of GrpcLink.pull in the trainer                call of PolicyOptimizer.update, after backward
    publish_swap    call of Snapshots.publish in the trainer    return of Core.update in the engine's thread

A walk is every call between its two ends, in each process from the moment at which the action arrives there to the moment at
which the process has passed the action on: `WALKS` has these stages. Not counted is what also runs without any action, such
as reports and periodic checks: a call whose whole stack of callers also occurs while the run is quiet, and has none of the
walk's own functions in it. The run is synchronous (staleness 0) and the trainer waits before each pull, so that the run is
quiet then, and walks do not overlap. Windows in which the engine decodes are left out of `engine_journal` and
`pull_gradient`: another rollout is played in them. A function belongs to a walk if it runs in more than half of the walk's
windows.

The count of files includes records, settings, telemetry and gRPC interceptors as soon as one of their functions runs. Not
counted: generated stubs, bodies of modules and classes (imports), and methods that `dataclasses` generates. So a package's
`__init__` that only re-exports does not count, and one with a function does.

    python benchmarks/walks.py [--files] [--quick]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._bench import report_facts
from benchmarks._walk_hooks import FOLDER, PAUSE, PAUSE_S
from benchmarks._walk_hooks import ROOT as ROOT_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
WAIT_S = 3.0  # before each pull, for the rollouts of the step
SETTLED_S = 0.1  # after the last decoding step and the last write of the journal, until the run is quiet
SETTINGS = (
    "warm_start.model0.steps=0",
    "policies.model0.batch.size=16",
    "policies.model0.batch.max_staleness=0",
    "rollout.group_size=4",
    "inference.a.engine=forced",
    "inference.a.num_slots=4",
    "data.evaluation.held_out.limit=4",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "run.until=null",
)

COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # parts of a function
DISPATCHER = "services/orchestrator/dispatcher.py:Dispatcher"
JOURNAL = "services/orchestrator/journal/journal.py:Journal"
TORCH = "services/inference/engine/torch"
RPC = "services/common/rpc/"
PULL = "services/trainer/link.py:GrpcLink.pull"
PULL_BATCH = "services/orchestrator/services/training.py:TrainingServicer.PullBatch"
PUBLISH = "services/trainer/publish.py:Snapshots.publish"
COMMAND = "services/inference/replica.py:Replica._apply_command"
PLAY = "services/inference/rollouts.py:RolloutPlayer.play"
DECODES = f"{TORCH}/engine.py:Core.step"


@dataclass(frozen=True, slots=True)
class Point:
    """A call of a function, or (``returns``) its end; a coroutine's last one before the next point."""

    name: str
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a walk in one process: that which calls ``home``, between two points of the walk.

    Calls below ``without`` do not count: the action has left that thread.
    """

    home: str
    begin: int
    end: int
    without: str = ""


@dataclass(frozen=True, slots=True)
class Walk:
    """Points in order of time, and the stages between them."""

    points: tuple[Point, ...]
    stages: tuple[Stage, ...]
    most_files: int  # the target
    alone: bool = False  # no decoding meanwhile


WALKS = {
    "task_dispatch": Walk(
        points=(
            Point(f"{DISPATCHER}.pump"),
            Point("services/orchestrator/tasks/orders.py:TrainingOrders.next_group"),
            Point(COMMAND),
            Point(PLAY),
        ),
        stages=(Stage(f"{DISPATCHER}.pump", 0, 2), Stage(PLAY, 2, 3)),
        most_files=16,
    ),
    "engine_journal": Walk(
        points=(
            Point(f"{TORCH}/engine.py:TorchEngine.generate", returns=True),
            Point("services/inference/records_out.py:TrajectorySender.send"),
            Point("services/inference/records_out.py:TrajectorySender._message"),
            Point("services/orchestrator/journal/entries.py:_segment_to_json"),
            Point(f"{JOURNAL}._write", returns=True),
        ),
        stages=(
            Stage(PLAY, 0, 2, without=f"{TORCH}/engine.py:TorchEngine._run"),
            Stage(f"{JOURNAL}._write", 2, 4),
        ),
        most_files=18,
        alone=True,
    ),
    "pull_gradient": Walk(
        points=(
            Point(PULL),
            Point(PULL_BATCH, returns=True),
            Point("services/trainer/model/optimizer.py:PolicyOptimizer.update"),
        ),
        stages=(Stage(PULL_BATCH, 0, 1), Stage(PULL, 0, 2)),
        most_files=28,
        alone=True,
    ),
    "publish_swap": Walk(
        points=(
            Point(PUBLISH),
            Point("services/orchestrator/versions.py:Announcer.plan_fetches"),
            Point(COMMAND),
            Point(f"{TORCH}/engine.py:Core.update", returns=True),
        ),
        stages=(
            Stage(PUBLISH, 0, 1),
            Stage(PULL_BATCH, 0, 2),
            Stage("services/trainer/publisher.py:PublisherStore.add", 0, 3),
            Stage(PLAY, 2, 3),
        ),
        most_files=36,
    ),
}

Calls = tuple[Sequence[int], Sequence[int]]  # times in nanoseconds and chains, in order
Times = Mapping[Point, Sequence[int]]


class Chains:
    """Functions together with their callers, by number: 0 is the empty chain."""

    def __init__(self) -> None:
        self.names = [""]
        self._callers = [0]
        self._numbers: dict[tuple[int, str], int] = {}
        self._is_rpc = [True]  # made of functions of services/common/rpc alone

    def called(self, caller: int, name: str) -> int:
        number = self._numbers.get((caller, name))
        if number is None:
            number = self._numbers[caller, name] = len(self.names)
            self.names.append(name)
            self._callers.append(caller)
            self._is_rpc.append(self._is_rpc[caller] and name.startswith(RPC))
        return number

    def is_below(self, chain: int, names: tuple[str, ...]) -> bool:
        """Whether one of ``names`` is the function or one of its callers."""
        while chain and self.names[chain] not in names:
            chain = self._callers[chain]
        return bool(chain)

    def is_rpc(self, chain: int) -> bool:
        """Whether the chain has only functions that every call between services passes."""
        return self._is_rpc[chain]


@dataclass(frozen=True, slots=True)
class Traces:
    """The calls of each process by file, the processes that call a function, and the times of the walks' points."""

    chains: Chains
    calls: Mapping[str, Calls]
    homes: Mapping[str, str]
    times: Times


@dataclass(frozen=True, slots=True)
class Counted:
    """The functions of one walk, in the order of their first call."""

    functions: tuple[str, ...]
    windows: int

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.partition(":")[0] for name in self.functions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--files", action="store_true", help="print the files of each walk in order, with their functions"
    )
    parser.add_argument("--quick", action="store_true", help="six training steps instead of twelve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmill-walks-") as folder:
        traces = read(trace(Path(folder), steps=6 if options.quick else 12))
    background = quiet_chains(traces)
    counted = {name: count(walk, traces, background) for name, walk in WALKS.items()}
    for name, found in counted.items():
        print(
            f"{name:16}{len(found.files):4} files (target {WALKS[name].most_files}), {len(found.functions):4} functions, {found.windows} windows"
        )
        if options.files:
            for path in found.files:
                print(f"    {path}")
                for function in found.functions:
                    if function.startswith(f"{path}:"):
                        print(f"        {function.partition(':')[2]}")
    report_facts(
        "walks",
        **{name: len(found.files) for name, found in counted.items()},
        functions={name: len(found.functions) for name, found in counted.items()},
        windows={name: found.windows for name, found in counted.items()},
        targets={name: walk.most_files for name, walk in WALKS.items()},
    )


def trace(folder: Path, steps: int) -> Path:
    """Run the recipe with recording processes; returns the folder of their records. Raises ``RuntimeError`` on failure."""
    traces, hooks = folder / "traces", folder / "hooks"
    traces.mkdir()
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text("import _walk_hooks\n_walk_hooks.install()\n")
    command = [sys.executable, "-m", "services.cli", "run", "recipes/quickstart"]
    for setting in (*SETTINGS, f"run.steps={steps}", f"run.dir={folder}", "run.id=run"):
        command += ["--set", setting]
    paths = (str(hooks), str(Path(__file__).parent), str(ROOT))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        FOLDER: str(traces),
        ROOT_VARIABLE: str(ROOT),
        PAUSE: PULL,
        PAUSE_S: str(WAIT_S),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    return traces


def read(folder: Path) -> Traces:
    """All calls of all processes. Raises ``RuntimeError`` for a point or a home that no process calls."""
    wanted = {(point.name, point.returns): point for walk in WALKS.values() for point in walk.points}
    wanted[DECODES, False] = Point(DECODES)
    homes = dict.fromkeys((stage.home for walk in WALKS.values() for stage in walk.stages), "")
    times: dict[Point, list[int]] = {point: [] for point in wanted.values()}
    chains, calls = Chains(), {}
    for path in folder.iterdir():
        own_times: list[int] = []
        own_chains: list[int] = []
        stacks: defaultdict[str, list[int]] = defaultdict(list)
        for at, thread, name, returns in _events(path):
            stack = stacks[thread]
            if (point := wanted.get((name, returns))) is not None:
                times[point].append(at)
            if not returns:
                stack.append(chains.called(stack[-1] if stack else 0, name))
                own_times.append(at)
                own_chains.append(stack[-1])
                if name in homes:
                    homes[name] = path.name
            elif any(chains.names[chain] == name for chain in stack):  # else called before the recording began
                while chains.names[stack.pop()] != name:
                    pass
        calls[path.name] = own_times, own_chains
    for found in times.values():
        found.sort()
    missing = [point.name for point, found in times.items() if not found] + [h for h, path in homes.items() if not path]
    if missing:
        raise RuntimeError(f"no process calls {', '.join(missing)}: correct the names in {__file__}")
    return Traces(chains, calls, homes, times)


def _events(path: Path) -> list[tuple[int, str, str, bool]]:
    """Time, thread, function and whether it ends, in order of time."""
    lines = path.read_text().splitlines()
    names = dict(line.split(" ", 1) for line in lines if not line.startswith("="))
    found = [line.split(" ") for line in lines if line.startswith("=")]
    return sorted((int(at), thread, names[number], kind == "r") for _, at, thread, number, kind in found)


def quiet_chains(traces: Traces) -> frozenset[int]:
    """The chains of calls at the end of each wait before a pull, when all rollouts of the step are done."""
    found: set[int] = set()
    work = sorted((*traces.times[Point(DECODES)], *traces.times[Point(f"{JOURNAL}._write", returns=True)]))
    for end in traces.times[Point(PULL)]:
        last = bisect_left(work, end)
        begin = max(end - int(WAIT_S * 1e9), work[last - 1] + int(SETTLED_S * 1e9) if last else 0)
        for times, chains in traces.calls.values():
            found.update(chains[bisect_left(times, begin) : bisect_left(times, end)])
    return frozenset(chain for chain in found if not traces.chains.is_rpc(chain))


def windows(walk: Walk, times: Times) -> list[tuple[int, ...]]:
    """The times of the points of each walk: backwards from each end, the newest one of each point before the next one."""
    found: dict[int, tuple[int, ...]] = {}
    for end in times[walk.points[-1]]:
        moments = [end]
        for point in reversed(walk.points[:-1]):
            index = bisect_left(times[point], moments[0])
            if not index:
                break
            moments.insert(0, times[point][index - 1])
        else:
            found.setdefault(moments[0], tuple(moments))  # further ends are further orders of one pump
    decoding = times[Point(DECODES)]
    return [
        moments
        for moments in found.values()
        if not walk.alone or bisect_left(decoding, moments[0]) == bisect_right(decoding, moments[-1])
    ]


def count(walk: Walk, traces: Traces, background: frozenset[int]) -> Counted:
    """The functions that run in more than half of the windows, by the median of the time from begin to first call."""
    found = windows(walk, traces.times)
    own = tuple(point.name for point in walk.points)
    first_calls: defaultdict[str, list[int]] = defaultdict(list)
    for moments in found:
        seen: dict[str, int] = {}
        for stage in walk.stages:
            times, chains = traces.calls[traces.homes[stage.home]]
            for index in range(bisect_left(times, moments[stage.begin]), bisect_right(times, moments[stage.end])):
                chain = chains[index]
                if traces.chains.is_below(chain, (stage.without,)):
                    continue
                if chain in background and not traces.chains.is_below(chain, own):
                    continue
                name = traces.chains.names[chain]
                seen[name] = min(seen.get(name, times[index]), times[index])
        for name, at in seen.items():
            first_calls[name].append(at - moments[0])
    usual = {name: statistics.median(after) for name, after in first_calls.items() if 2 * len(after) > len(found)}
    functions = sorted((name for name in usual if not name.endswith(COMPREHENSIONS)), key=usual.__getitem__)
    return Counted(tuple(functions), len(found))


if __name__ == "__main__":
    main()
