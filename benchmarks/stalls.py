"""Checks that each kind of stall is reported, and that slow components are not.

Small runs of real processes are brought to a standstill in more than twenty ways: processes are stopped (SIGSTOP) or
killed for good, connections lose one direction, are held half open or read at one byte a second, the disk is filled,
threads deadlock, an engine stops decoding, Redis and workers go away, rewards are all alike or all fail, the data runs
out. Each must be named by its component and its cause within 30 s; then the fault is removed, and must be reported no
more before the next one.

Beside them a run goes on with slow and healthy parts (generations, rewards, steps): a stall named there, or elsewhere
before the first injection, is a false alarm.

    injected, named    stalls; those whose expected (component, cause) was named in time
    seconds            from the injection to the name: median, and the longest
    false_alarms       names in healthy runs
    nothing_else_named injections during which no other name was told
    each               the expected stall, the reported one, and the time between

Three worlds run side by side for each core, on four cores all of them: some fifty processes and 4 GiB, four minutes on
two cores. ``--quick`` injects one stall into each of six worlds, within a minute. Redis needs a redis-server, a full
disk the right to mount a small tmpfs: ``left_out`` names the worlds with requirements that a machine lacks.

    python benchmarks/stalls.py [--quick] [--rounds 1] [--only NAME ...] [--keep]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._bench import report_facts, why_not
from benchmarks._peers import ScriptedTrainer
from benchmarks._stall_worlds import Shape, Step, World
from services.cli.watch import OrchestratorLiveness
from services.common.errors import RollmillError
from services.common.system.machine import num_cores

NAMED_WITHIN_S = 30.0
MENDED_WITHIN_S = 60.0
AGAIN_AFTER_S = 4.0  # between two injections, healthy
QUICK = (
    "ranks",
    "network",
    "half-open",
    "replica",
    "learning",
    "orchestrator",
)  # worlds of which --quick injects the first stall
SLOW_S, QUICK_SLOW_S = 240.0, 40.0  # of the healthy run beside them
WORLDS_PER_CORE = 3  # side by side; with more the start of others takes so long that a world is not ready in time

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Injection:
    name: str
    expected: tuple[Pair, ...]  # any of them
    inject: Step
    mend: Step | None = None  # None: the last of its world
    look: Callable[[World, OrchestratorLiveness], set[Pair]] | None = None


@dataclass(kw_only=True)
class Result:
    name: str
    expected: tuple[Pair, ...]
    named: set[Pair] = field(default_factory=set)
    seconds: float | None = None


def stopped(name: str, process: str, *expected: Pair) -> Injection:
    return Injection(
        name=name,
        expected=expected,
        inject=lambda world: world.send(process, signal.SIGSTOP),
        mend=lambda world: world.send(process, signal.SIGCONT),
    )


def killed(name: str, process: str, *expected: Pair) -> Injection:
    return Injection(name=name, expected=expected, inject=lambda world: world.send(process, signal.SIGKILL))


def switched(name: str, switch: str, *expected: Pair) -> Injection:
    return Injection(
        name=name,
        expected=expected,
        inject=lambda world: world.switch(switch, True),
        mend=lambda world: world.switch(switch, False),
    )


def proxied(name: str, which: str, mode: str, *expected: Pair) -> Injection:
    return Injection(
        name=name,
        expected=expected,
        inject=lambda world: world.proxy(which, mode),
        mend=lambda world: world.proxy(which, "pass"),
    )


def _by_the_cli(world: World, liveness: OrchestratorLiveness) -> set[Pair]:
    """The orchestrator cannot report itself: its watcher does."""
    with contextlib.suppress(RollmillError):
        world.client.get_run()
        liveness.answered()
    return {(stall.component, stall.cause)} if (stall := liveness.stall) is not None else set()


def _end_failures(world: World) -> None:
    """The run may have paused itself meanwhile, until a person resumes the run."""
    world.switch("failing", False)
    world.client.resume()


REPLICA, GATEWAY, TRAINER = "replica/a", "envgateway", "trainer/model0"

WORLDS: list[tuple[Shape, list[Injection]]] = [
    (
        Shape(name="ranks", ranks=2),
        [
            stopped("a rank stopped", "rank1", (f"{TRAINER}/rank1", "silent")),
            stopped("publisher stopped", "publisher", ("publisher/model0", "silent")),
            killed("trainer killed for good", "trainer", (TRAINER, "silent"), (TRAINER, "lost")),
        ],
    ),
    (
        Shape(name="redis", gateway=True, redis=True),
        [
            stopped("Redis stopped", "redis", ("redis", "unreachable")),
            killed("Redis killed for good", "redis", ("redis", "unreachable")),
        ],
    ),
    (
        Shape(name="workers", gateway=True, redis=True),
        [stopped("gateway's worker stopped", "worker", (f"{GATEWAY}/workers", "no_workers"))],
    ),
    (
        Shape(name="network", proxied=("orchestrator",), small_disk=True),
        [
            Injection(
                name="disk full", expected=(("disk", "no_free_disk"),), inject=World.fill_disk, mend=World.empty_disk
            ),
            proxied("orders lost on the way", "orchestrator", "drop-down", (REPLICA, "order_lost")),
            proxied("slow reader", "orchestrator", "slow-up", (REPLICA, "silent")),
        ],
    ),
    (
        Shape(name="gateway", gateway=True),
        [
            stopped("gateway stopped", "gateway", (GATEWAY, "silent")),
            switched("sandbox exhausted", "programs", (GATEWAY, "exhausted")),
        ],
    ),
    (
        Shape(name="half-open", gateway=True, proxied=("gateway",)),
        [
            proxied("half-open connection to the gateway", "gateway", "hold", (GATEWAY, "silent")),
            killed("gateway killed for good", "gateway", (GATEWAY, "silent")),
        ],
    ),
    (
        Shape(name="replica"),
        [
            stopped("inference stopped", "inference", (REPLICA, "silent")),
            switched("worker thread deadlocked", "deadlock", (REPLICA, "stuck")),
            killed("inference killed for good", "inference", (REPLICA, "silent"), (REPLICA, "lost")),
        ],
    ),
    (
        Shape(name="learning", settings={"policies": {"model0": {"batch": {"dynamic_sampling": True}}}}),
        [
            switched("all rewards alike", "constant", ("workflow", "all_filtered")),
            Injection(
                name="every rollout fails",
                expected=(("rollouts", "all_fail"),),
                inject=lambda world: world.switch("failing", True),
                mend=_end_failures,
            ),
            stopped("trainer stopped", "trainer", (TRAINER, "silent")),
        ],
    ),
    (
        Shape(name="engine"),
        [
            switched("engine no longer decodes", "engine", (f"{REPLICA}/engine/model0", "frozen")),
            killed("trainer's process killed for good", "trainer", (TRAINER, "silent"), (TRAINER, "lost")),
        ],
    ),
    (
        # A task is left out after 29 solved groups: one task is solved soon.
        Shape(name="curation", settings={"data": {"curation": "filter_solved", "train": {"limit": 1}}}),
        [
            switched("data exhausted", "constant", ("dataset", "nothing_to_play")),
            Injection(
                name="orchestrator stopped",
                expected=(("orchestrator", "silent"),),
                inject=lambda world: world.send("orchestrator", signal.SIGSTOP),
                look=_by_the_cli,
            ),
        ],
    ),
    (
        Shape(name="orchestrator"),
        [
            Injection(
                name="orchestrator killed for good",
                expected=(("orchestrator", "silent"),),
                inject=lambda world: world.send("orchestrator", signal.SIGKILL),
                look=_by_the_cli,
            ),
        ],
    ),
]

SLOW = Shape(
    name="slow", gateway=True, latency_s=4.0, tokens_per_s=8.0, reward_s=3.0, train_s=5.0,
    settings={"policies": {"model0": {"batch": {"size": 8}}}},
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one stall in each of six worlds")
    parser.add_argument("--rounds", type=int, default=1, help="how often each stall is injected")
    parser.add_argument("--only", nargs="*", default=[], help="names of worlds; `slow` is the healthy one")
    parser.add_argument("--keep", action="store_true", help="leave the run directories")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        asyncio.run(_trainer(*options.trainer.rsplit("/", 1)))
        return
    results: list[Result] = []
    false_alarms: list[str] = []
    worlds = _chosen(options)
    left_out = _left_out(shape for shape, _ in worlds)
    worlds = [(shape, injections) for shape, injections in worlds if f"world {shape.name}" not in left_out]
    for _ in range(options.rounds):
        _round(options, worlds, results, false_alarms)
    seconds = [result.seconds for result in results if result.seconds is not None]
    report_facts(
        "stalls",
        injected=len(results),
        named=len(seconds),
        seconds={
            "median": round(statistics.median(seconds), 1) if seconds else None,
            "longest": round(max(seconds), 1) if seconds else None,
        },
        false_alarms=len(false_alarms),
        nothing_else_named=sum(result.named <= set(result.expected) for result in results if result.named),
        limit_s=NAMED_WITHIN_S,
        each=[
            {
                "name": result.name,
                "expected": [" ".join(pair) for pair in result.expected],
                "named": sorted(" ".join(pair) for pair in result.named),
                "seconds": result.seconds,
            }
            for result in results
        ],
        what_was_false=false_alarms,
        left_out=left_out,
    )


def _chosen(options: argparse.Namespace) -> list[tuple[Shape, list[Injection]]]:
    names = options.only or (QUICK if options.quick else [shape.name for shape, _ in WORLDS])
    num = 1 if options.quick else None
    return [(shape, injections[:num]) for shape, injections in WORLDS if shape.name in names]


def _left_out(shapes: Iterable[Shape]) -> dict[str, str]:
    """Names of worlds with requirements that this machine lacks, and why."""
    asked = list(shapes)
    no_redis = why_not("redis-server") if any(shape.redis for shape in asked) else None
    no_tmpfs = why_not("tmpfs") if any(shape.small_disk for shape in asked) else None
    reasons = {
        shape.name: (no_redis if shape.redis else None) or (no_tmpfs if shape.small_disk else None) for shape in asked
    }
    return {f"world {name}": reason for name, reason in reasons.items() if reason}


def _round(
    options: argparse.Namespace,
    worlds: Sequence[tuple[Shape, list[Injection]]],
    results: list[Result],
    false_alarms: list[str],
) -> None:
    at_once = threading.Semaphore(max(1, int(WORLDS_PER_CORE * num_cores())))

    def in_turn(*arguments: Any) -> None:
        with at_once:
            _try(*arguments)

    threads = [
        threading.Thread(target=in_turn, args=(shape, injections, results, false_alarms, options.keep))
        for shape, injections in worlds
    ]
    slow_s = QUICK_SLOW_S if options.quick else SLOW_S
    if not options.only or "slow" in options.only:
        # The first, so that the stalls of others go on beside it.
        threads.insert(0, threading.Thread(target=_be_slow, args=(slow_s, false_alarms, options.keep)))
    for thread in threads:
        thread.start()
        time.sleep(0.5)  # importing is what costs: one after the other
    for thread in threads:
        thread.join()


def _try(shape: Shape, injections: list[Injection], results: list[Result], false_alarms: list[str], keep: bool) -> None:
    world = World(shape)
    own = [Result(name=injection.name, expected=injection.expected) for injection in injections]
    results.extend(own)
    try:
        world.start()
        told = world.wait_until_healthy()
        false_alarms += [f"{shape.name}, before anything was injected: {' '.join(pair)}" for pair in told]
        for injection, result in zip(injections, own, strict=True):
            _one(world, injection, result)
            say = "named" if result.seconds is not None else "NOT NAMED"
            sys.stderr.write(f"{shape.name}: {injection.name}: {say} {result.seconds} {sorted(result.named)}\n")
            if injection.mend is not None and injection is not injections[-1]:
                injection.mend(world)
                if world.shape.name != "curation":  # tasks that are solved stay solved
                    world.wait_until_healthy(seconds=AGAIN_AFTER_S)
    except RuntimeError as error:
        sys.stderr.write(f"{shape.name}: {error}\n")
    finally:
        world.close(keep)


def _one(world: World, injection: Injection, result: Result) -> None:
    liveness = OrchestratorLiveness(world.client.address, pid=lambda: world.processes["orchestrator"].pid)
    liveness.answered()
    injection.inject(world)
    began = time.monotonic()
    while time.monotonic() - began < NAMED_WITHIN_S:
        if injection.look is not None:
            found = injection.look(world, liveness)
        else:
            progress = world.progress()
            found = {(s.component, s.cause) for s in progress.stalls} if progress is not None else set()
        result.named |= found
        if found & set(injection.expected):
            result.seconds = round(time.monotonic() - began, 1)
            return
        time.sleep(0.2)


def _be_slow(seconds: float, false_alarms: list[str], keep: bool) -> None:
    world = World(SLOW)
    told: set[Pair] = set()
    try:
        world.start()
        world.wait_until_healthy(versions=1, seconds=0.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            progress = world.progress()
            for stall in progress.stalls if progress is not None else ():
                if (stall.component, stall.cause) not in told:
                    told.add((stall.component, stall.cause))
                    false_alarms.append(f"slow: {stall.component} {stall.cause}: {stall.detail}")
            time.sleep(0.2)
        version = progress.policies[0].version if progress is not None else -1
        sys.stderr.write(f"slow: {len(told)} false alarms, version {version}\n")
    except RuntimeError as error:
        false_alarms.append(f"slow: {error}")
    finally:
        world.close(keep)


async def _trainer(address: str, train_s: str) -> None:
    trainer = ScriptedTrainer(address, train_s=float(train_s))
    await trainer.run(1_000_000)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
