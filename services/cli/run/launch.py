"""``rollmill run``: starts a recipe's processes on this node, shows the run, and stops these processes."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.status import Status

from services.cli.check.memory.host import loading_s
from services.cli.console.drawing import drawn
from services.cli.console.errors import Interrupted, StopSignal
from services.cli.console.plain import say
from services.cli.inspect.run_state import Row, check_can_go_on, ended, launcher_lock, read_rows
from services.cli.keys.process_keys import check_dates, keys_of, operate, renew_in_time, with_keys, write_bundles
from services.cli.plan.nodes import commands_for_other_nodes
from services.cli.plan.specs import (
    ProcessSpec,
    orchestrator_address,
    plan,
    trainer_name,
    warm_start_commands,
)
from services.cli.run.processes import WATCH_S, Processes, children_cpu_seconds
from services.cli.run.run_directory import with_other_ports
from services.cli.watch.notices import OrchestratorLiveness, StallsAtStart, TrackersTold, show_now
from services.cli.watch.orchestrator_client import OrchestratorClient
from services.cli.watch.progress_view import ProgressView, StallsTold
from services.common import run_files
from services.common.config.recipe import Recipe
from services.common.errors import InfrastructureError
from services.common.system.cores import num_cores
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.logs import configure
from services.common.telemetry.summary import RunSummary

log = structlog.get_logger()

POLL_S = 0.5
FINISH_TIMEOUT_S = 60.0
KEYS_EVERY_S = 3600.0  # between two looks at how long the run's keys last
_NEEDED = ("trainer-", "envgateway")  # until the run has ended; replicas may leave, as those that are drained do


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    run_dir: Path
    summary: RunSummary
    picture: Path | None


def run(recipe: Recipe, run_dir: Path, console: Console) -> Outcome:
    """Run to the end. Ctrl-C and SIGTERM stop the started processes and raise ``Interrupted``.

    Prints the commands for other nodes when node 0 is ready.

    Raises ``InfrastructureError`` or ``DeadlineError`` with the last log lines of the process that failed, and
    ``ConfigError`` when another launcher holds or has ended the run.
    """
    with launcher_lock(run_dir):
        check_can_go_on(run_dir)  # another launcher may have had it until now
        return _run(with_other_ports(recipe, run_dir, console), run_dir, console)


def _run(recipe: Recipe, run_dir: Path, console: Console) -> Outcome:
    configure(service="launcher", run_dir=run_dir)
    keys = keys_of(recipe, run_dir)
    renew_in_time(keys)
    if keys is not None:
        write_bundles(recipe, run_dir, keys)
    check_dates(operate(keys))
    begun, load = time.monotonic(), round(os.getloadavg()[0], 2)
    stop = StopSignal()
    processes = Processes(run_dir, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        if warm_start_commands(recipe, run_dir):
            _fork(recipe, plan(recipe, run_dir), processes)  # one import of torch for warm starts and services
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
        if not ended(run_dir):  # else the run is over, and its processes only leave
            trained = ", ".join(
                name.removeprefix("trainer-") for name in processes.pids() if name.startswith("trainer-")
            )
            first = f"writing a checkpoint of {trained}, then " if trained else ""
            ending = f"ending {', '.join(processes.pids()) or 'processes'} (at most {recipe.launch.stop_grace_s:g} s)"
            say(console, f"stopping: {first}{ending}; Ctrl-C again kills them at once")
            killed = ", ".join(f"{name} (pid {pid})" for name, pid in processes.stop(stop.again()).items())
            told = f"interrupted; killed before the end of its work: {killed}" if killed else "interrupted"
            raise Interrupted(f"{told}; go on with it: rollmill run --resume {run_dir}") from None
    finally:
        try:
            processes.stop(stop.again())
            _sweep(run_dir)
        finally:
            stop.restore()
    seconds = time.monotonic() - begun
    summary = _summary(run_dir, seconds, load)
    return Outcome(run_dir, summary, drawn(lambda: _picture(run_dir), console))


def _tell_other_nodes(recipe: Recipe, run_dir: Path, console: Console) -> None:
    for line in commands_for_other_nodes(recipe, run_dir):
        say(console, line)


def warm_start(recipe: Recipe, run_dir: Path, processes: Processes, console: Console, stop: StopSignal) -> None:
    """Make the starting checkpoints that are missing, one after the other."""
    metrics = run_files.warm_start_metrics(run_dir)
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
    _fork(recipe, specs, processes)
    # Forked processes come last: they wait for the imports, while the others start.
    for spec in sorted(specs, key=lambda spec: spec.forked == "always"):
        processes.start(spec)
    _write_pids(run_dir, processes)
    with closing(OrchestratorClient(orchestrator_address(recipe))) as client:
        stalls = StallsAtStart(client, StallsTold(console))

        def tick() -> None:
            stop.check()
            stalls()

        with console.status(f"starting {', '.join(spec.name for spec in specs)}"):
            processes.wait_ready(recipe.ready_timeout_s + loading_s(recipe), tick, later, ends_with="orchestrator")
    ready = [spec for spec in specs if spec.name not in later]
    say(console, f"ready: {', '.join(f'{spec.name} {spec.address}' for spec in ready)}")


def _fork(recipe: Recipe, specs: Sequence[ProcessSpec], processes: Processes) -> None:
    if recipe.launch.fork and any(spec.forked == "always" for spec in specs):
        processes.fork_where_possible()


def _follow(
    recipe: Recipe, run_dir: Path, keys: Path | None, processes: Processes, console: Console, stop: StopSignal
) -> None:
    finished_at: float | None = None
    keys_looked_at = time.monotonic()
    pids = processes.pids()
    with closing(OrchestratorClient(orchestrator_address(recipe))) as client:
        liveness = OrchestratorLiveness(
            client.address, pid=lambda: processes.pids().get("orchestrator"), run_dir=run_dir
        )
        trackers = TrackersTold(recipe, run_dir, console)
        with ProgressView(console, title=str(recipe.run.id)) as view:
            while True:
                stop.check()
                trackers.look()
                if time.monotonic() - keys_looked_at > KEYS_EVERY_S:
                    keys_looked_at = time.monotonic()
                    _keep_keys(recipe, run_dir, keys, client)
                gone = processes.watch()
                if "orchestrator" in gone:
                    if ended(run_dir):
                        break  # the run is over and all peers know it
                    processes.bring_back(["orchestrator"])
                if finished_at is None:
                    goes_on = False
                    with suppress(InfrastructureError):  # shown by the view
                        goes_on = not show_now(client, view, liveness)
                        finished_at = None if goes_on else time.monotonic()
                    if view.paused_itself and not console.is_terminal:  # and so no person to end the pause
                        raise InfrastructureError(
                            f"{view.paused_itself}. Without a terminal the run ends here instead; go on with it: rollmill run "
                            f"--resume {run_dir}"
                        )
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
    trackers.at_end()


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
    from services.common.weights.snapshot import DEFAULT_DIRECTORIES, sweep_orphans  # numpy, only at the end

    for removed in sweep_orphans([*DEFAULT_DIRECTORIES, run_dir / "snapshots"]):
        log.info(LogEvent.SNAPSHOT_ORPHAN_REMOVED, path=str(removed))


def _write_pids(run_dir: Path, processes: Processes) -> None:
    beside = (
        run_dir / ".pids.json.partial"
    )  # so that no reader sees half a file, and a full disk leaves the previous one
    beside.write_text(json.dumps(processes.pids(), indent=1))
    beside.replace(run_files.pids(run_dir))


def _summary(run_dir: Path, seconds: float, load: float) -> RunSummary:
    """The orchestrator's summary, with the launcher's figures: seconds, cores, the load at the start."""
    path = run_files.summary(run_dir)
    if not path.exists():
        raise InfrastructureError(f"the orchestrator left no {path}; see {run_files.logs(run_dir)}")
    summary: RunSummary = json.loads(path.read_text())
    summary["seconds"], summary["cpu_seconds"] = round(seconds, 1), round(children_cpu_seconds(), 1)
    summary["cores"], summary["load"] = num_cores(), load
    path.write_text(json.dumps(summary, indent=1))
    return summary


def headline(summary: RunSummary, *, short: bool = False) -> dict[str, Any]:
    """One flat object: ``<sampling>_before`` and ``_after`` of every evaluation, and the figures people compare. ``short``:
    with short names of roles, to be read and not to be parsed."""
    flat: dict[str, Any] = {}
    for name, result in summary.get("evaluations", {}).items():
        moment, _, sampling = name.partition("/")
        suffix = {"start": "before", "end": "after"}.get(moment)
        if suffix:
            mean = result["mean_reward"]
            flat[f"{sampling}_{suffix}"] = None if mean is None else round(mean, 4)
            for role, reward in result["roles"].items() if len(result["roles"]) > 1 else ():
                parts = dict.fromkeys(role.removesuffix("/0").split("/"))  # "b/b/0": the first attempt of b as b
                flat[f"{sampling}/{'/'.join(parts) if short else role}_{suffix}"] = round(reward, 4)
    if (threshold := summary.get("until")) is not None:
        flat["threshold_reached"] = threshold["reached"]
        if threshold["reached"]:
            flat |= {"threshold_step": threshold["step"], "threshold_seconds": round(threshold["seconds"], 1)}
    figures = {
        "overlap_share": summary.get("overlap_share"),
        "max_staleness": summary.get("max_staleness"),
        "seconds": summary.get("seconds"),
        "cpu_seconds": summary.get("cpu_seconds"),
        "cores": summary.get("cores"),
        "load": summary.get("load"),
    }
    flat |= {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    return flat


def how_training_ended(summary: RunSummary) -> str:
    """A sentence about the threshold of ``run.until``; empty where the recipe has none."""
    threshold = summary.get("until")
    if threshold is None:
        return ""
    steps = max(summary["steps"].values(), default=0)
    if threshold["reached"]:
        when = f"after training step {threshold['step']}" if threshold["step"] else "before training"
        return f"threshold reached {when}, {threshold['seconds']:.0f} s into the run ({threshold['wanted']}); trained steps: {steps}"
    newest = (
        "no evaluation that counts" if threshold["newest"] is None else f"newest evaluation {threshold['newest']:.3f}"
    )
    return f"threshold not reached in {steps} training steps ({threshold['wanted']}): {newest}"


def _picture(run_dir: Path) -> Path | None:
    from services.cli.inspect.pictures.runs import plot_runs
    from services.cli.inspect.pictures.time import plot_time

    plot_time(run_dir, run_dir / "time.png")
    return plot_runs([run_dir], run_dir / "run.png")


def _last_row(path: Path, policy: str) -> Row | None:
    rows = (row for row in read_rows(path) if row.get("policy") == policy) if path.exists() else ()
    return next(iter(deque(rows, maxlen=1)), None)
