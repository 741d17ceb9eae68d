"""``millrace run``: start a recipe's processes on this node, show the run, stop exactly what was started."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.status import Status

from services.cli.drawing import drawn
from services.cli.errors import Interrupted
from services.cli.follow import show_now
from services.cli.launch_keys import check_dates, keys_of, operate, renew_in_time, with_keys
from services.cli.node_bundles import write_bundles
from services.cli.nodes import commands_for_other_nodes
from services.cli.orchestrator_client import OrchestratorClient
from services.cli.plan import (
    orchestrator_address,
    plan,
    trainer_name,
    warm_start_commands,
)
from services.cli.processes import Processes, children_cpu_seconds
from services.cli.progress_view import ProgressView, StallsTold
from services.cli.rows import Row, read_rows
from services.cli.run_directory import launcher_lock
from services.cli.run_state import SUMMARY, check_can_go_on, ended
from services.cli.signals import StopSignal
from services.cli.silence import Silence
from services.cli.starting import StallsAtStart
from services.common.config.recipe import Recipe
from services.common.cores import num_cores
from services.common.errors import InfrastructureError
from services.common.logs import configure

log = structlog.get_logger()

POLL_S = 0.5
WATCH_S = 0.1  # between two looks at whether a process has ended
FINISH_TIMEOUT_S = 60.0
KEYS_EVERY_S = 3600.0  # between two looks at how long the run's keys last
_NEEDED = ("trainer-", "envgateway")  # until the run has ended; replicas may leave, as those that are drained do


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run."""

    run_dir: Path
    summary: dict[str, Any]
    picture: Path | None


def run(recipe: Recipe, run_dir: Path, console: Console) -> Outcome:
    """Run to the end. Ctrl-C and SIGTERM stop what was started and raise ``Interrupted``.

    When node 0 is up, the commands for other nodes are printed.

    Raises ``InfrastructureError`` or ``DeadlineError`` with the last words of the process that failed, and ``ConfigError``
    when another launcher has the run, or has brought it to its end.
    """
    with launcher_lock(run_dir):
        check_can_go_on(run_dir)  # another launcher may have had it until now
        return _run(recipe, run_dir, console)


def _run(recipe: Recipe, run_dir: Path, console: Console) -> Outcome:
    configure(service="launcher", run_dir=run_dir)
    keys = keys_of(recipe, run_dir)
    renew_in_time(keys)
    if keys is not None:
        write_bundles(recipe, run_dir, keys)
    check_dates(operate(keys))
    begun, machine = time.monotonic(), {"cores": num_cores(), "load": round(os.getloadavg()[0], 2)}
    stop = StopSignal()
    processes = Processes(run_dir, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        warm_start(recipe, run_dir, processes, console, stop)
        shared = {
            trainer_name(name, 0) for name, policy in recipe.trained_policies.items() if len(policy.trainer.nodes) > 1
        }
        if shared:
            _tell_other_nodes(recipe, run_dir, console)  # their ranks are waited for
        _start(recipe, run_dir, keys, processes, console, stop, shared)
        if not shared:
            _tell_other_nodes(recipe, run_dir, console)
        _follow(recipe, run_dir, keys, processes, console, stop)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; go on with it: millrace run --resume {run_dir}") from None
    finally:
        stop.restore()
        processes.stop()
        _sweep(run_dir)
    seconds = time.monotonic() - begun
    summary = _summary(run_dir, {"seconds": round(seconds, 1), **machine})
    return Outcome(run_dir, summary, drawn(lambda: _picture(run_dir), console))


def _tell_other_nodes(recipe: Recipe, run_dir: Path, console: Console) -> None:
    for line in commands_for_other_nodes(recipe, run_dir):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def warm_start(recipe: Recipe, run_dir: Path, processes: Processes, console: Console, stop: StopSignal) -> None:
    """Make the starting checkpoints that are missing, one after the other."""
    metrics = run_dir / "metrics" / "warm_start.jsonl"
    for spec in warm_start_commands(recipe, run_dir):
        policy = spec.name.removeprefix("warm-start-")
        with console.status(f"{spec.name}: making the starting checkpoint") as status:

            def tick(name: str = spec.name, policy: str = policy, status: Status = status) -> None:
                stop.check()
                if row := _last_row(metrics, policy):
                    status.update(
                        f"{name}: update {row.get('step')}/{row.get('steps')}, loss {row.get('loss', math.nan):.3f}"
                    )

            processes.run_to_end(with_keys(spec, None), tick)
        last = _last_row(metrics, policy)
        told = f"{last['step']} updates, loss {last['loss']:.3f}" if last else "random weights, no updates"
        console.print(f"{spec.name} done: {told}")


def _start(
    recipe: Recipe,
    run_dir: Path,
    keys: Path | None,
    processes: Processes,
    console: Console,
    stop: StopSignal,
    later: Collection[str],  # processes that cannot be ready before other nodes have come
) -> None:
    specs = [with_keys(spec, keys) for spec in plan(recipe, run_dir)]
    if recipe.launch.fork and any(spec.forked == "always" for spec in specs):
        processes.fork_where_possible()
    # What is forked comes last: its start waits for the imports, beside which the others come up.
    for spec in sorted(specs, key=lambda spec: spec.forked == "always"):
        processes.start(spec)
    _write_pids(run_dir, processes)
    with closing(OrchestratorClient(orchestrator_address(recipe))) as client:
        stalls = StallsAtStart(client, StallsTold(console))

        def tick() -> None:
            stop.check()
            stalls()

        with console.status(f"starting {', '.join(spec.name for spec in specs)}"):
            processes.wait_ready(recipe.ready_timeout_s, tick, later, ends_with="orchestrator")
    ready = [spec for spec in specs if spec.name not in later]
    console.print(
        f"ready: {', '.join(f'{spec.name} {spec.address}' for spec in ready)}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _follow(
    recipe: Recipe, run_dir: Path, keys: Path | None, processes: Processes, console: Console, stop: StopSignal
) -> None:
    finished_at: float | None = None
    keys_looked_at = time.monotonic()
    pids = processes.pids()
    with closing(OrchestratorClient(orchestrator_address(recipe))) as client:
        silence = Silence(client.address, pid=lambda: processes.pids().get("orchestrator"), run_dir=run_dir)
        with ProgressView(console, title=str(recipe.run.id)) as view:
            while True:
                stop.check()
                if time.monotonic() - keys_looked_at > KEYS_EVERY_S:
                    keys_looked_at = time.monotonic()
                    _keep_keys(recipe, run_dir, keys, client)
                gone = processes.watch()
                if "orchestrator" in gone:
                    if ended(run_dir):
                        break  # the run is over and everybody has been told
                    processes.bring_back(["orchestrator"])
                if finished_at is None:
                    goes_on = False
                    with suppress(InfrastructureError):  # told by the view
                        goes_on = not show_now(client, view, silence)
                        finished_at = None if goes_on else time.monotonic()
                    if goes_on:  # and did so after they had left: it was not the end of the run that they left for
                        processes.bring_back(name for name in gone if name.startswith(_NEEDED))
                elif time.monotonic() - finished_at > FINISH_TIMEOUT_S:
                    log.warning("orchestrator.lingers", after_s=FINISH_TIMEOUT_S)
                    break
                if processes.pids() != pids:
                    with suppress(OSError):  # a full disk: the next look tries again
                        _write_pids(run_dir, processes)
                        pids = processes.pids()
                for _ in range(round(POLL_S / WATCH_S)):  # a process that died is started again sooner than people look
                    time.sleep(WATCH_S)
                    processes.watch()
    _wait_for_farewells(processes, recipe.launch.stop_grace_s)


def _keep_keys(recipe: Recipe, run_dir: Path, keys: Path | None, client: OrchestratorClient) -> None:
    """Renew the run's keys while they are good: other nodes get new bundles, processes here take them up by themselves."""
    if keys is not None and renew_in_time(keys):
        write_bundles(recipe, run_dir, keys)
        operate(keys)
        client.reconnect()


def _wait_for_farewells(processes: Processes, grace_s: float) -> None:
    """Trainers export and leave, replicas drain and leave, on the orchestrator's word. The gateway, which leaves when the
    orchestrator does, is not waited for."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        leaving = {name for name in processes.pids() if name.startswith(("trainer-", "inference-"))}
        if leaving <= processes.watch():
            return
        time.sleep(POLL_S)


def _sweep(run_dir: Path) -> None:
    """Weights of processes that were killed: a trainer that is started again would remove them, and none is."""
    from services.common.weights.snapshot_file import DEFAULT_DIRECTORIES, sweep_orphans  # numpy, only at the end

    for removed in sweep_orphans([*DEFAULT_DIRECTORIES, run_dir / "snapshots"]):
        log.info("snapshot.orphan_removed", path=str(removed))


def _write_pids(run_dir: Path, processes: Processes) -> None:
    beside = run_dir / ".pids.json.partial"  # so that nobody reads half a file, and a full disk leaves the one before
    beside.write_text(json.dumps(processes.pids(), indent=1))
    beside.replace(run_dir / "pids.json")


def _summary(run_dir: Path, launched: dict[str, float]) -> dict[str, Any]:
    """What the orchestrator says, and what the launcher knows: seconds, cores, the load when it began."""
    path = run_dir / SUMMARY
    if not path.exists():
        raise InfrastructureError(f"the orchestrator left no {path}; see {run_dir / 'logs'}")
    summary: dict[str, Any] = json.loads(path.read_text())
    summary |= launched
    summary["cpu_seconds"] = round(children_cpu_seconds(), 1)
    path.write_text(json.dumps(summary, indent=1))
    return summary


def headline(summary: dict[str, Any]) -> dict[str, Any]:
    """One flat object: ``<sampling>_before`` and ``_after`` of every evaluation, and the figures people compare."""
    flat: dict[str, Any] = {}
    for name, result in summary.get("evaluations", {}).items():
        moment, _, sampling = name.partition("/")
        suffix = {"start": "before", "end": "after"}.get(moment)
        if suffix:
            flat[f"{sampling}_{suffix}"] = round(result["mean_reward"], 4)
            if len(result["roles"]) > 1:
                flat |= {f"{sampling}/{role}_{suffix}": round(reward, 4) for role, reward in result["roles"].items()}
    for key in ("overlap_share", "max_staleness", "seconds", "cpu_seconds", "cores", "load"):
        value = summary.get(key)
        flat[key] = round(value, 4) if isinstance(value, float) else value
    return flat


def _picture(run_dir: Path) -> Path | None:
    from services.cli.plot import plot_runs
    from services.cli.plot_time import plot_time

    plot_time(run_dir, run_dir / "time.png")
    return plot_runs([run_dir], run_dir / "run.png")


def _last_row(path: Path, policy: str) -> Row | None:
    rows = (row for row in read_rows(path) if row.get("policy") == policy) if path.exists() else ()
    return next(iter(deque(rows, maxlen=1)), None)
