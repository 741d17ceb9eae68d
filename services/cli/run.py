"""``millrace run``: start a recipe's processes on this node, show the run, stop exactly what was started."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.status import Status

from services.cli.errors import Interrupted
from services.cli.launch_keys import keys_of, operate, renew_in_time, with_keys
from services.cli.orchestrator_client import OrchestratorClient
from services.cli.plan import plan, ports_in_use, warm_start_commands, with_free_ports
from services.cli.processes import Processes, children_cpu_seconds
from services.cli.progress_view import ProgressView, state_word
from services.cli.signals import StopSignal
from services.common.config.loading import load_resolved, save_resolved, with_run_id
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, InfrastructureError
from services.common.logs import configure

log = structlog.get_logger()

POLL_S = 0.5
FINISH_TIMEOUT_S = 60.0
KEYS_EVERY_S = 3600.0  # between two looks at how long the run's keys last


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run."""

    run_dir: Path
    summary: dict[str, Any]
    picture: Path | None


def prepare(recipe: Recipe) -> tuple[Recipe, Path]:
    """Resolve id, ports and directory of a new run and save the resolved recipe there.

    Raises ``ConfigError`` when the directory exists already or a port is taken.
    """
    recipe = with_run_id(recipe)
    run_dir = (Path(recipe.run.dir) / str(recipe.run.id)).resolve()
    if (run_dir / "recipe.json").exists():
        raise ConfigError(
            f"{run_dir} holds a run already: choose another name with --set run.id=NAME, "
            f"or go on with it: millrace run --resume {run_dir}"
        )
    recipe = with_free_ports(recipe)
    if taken := ports_in_use(recipe):
        raise ConfigError("\n".join(taken))
    save_resolved(recipe, run_dir)
    return recipe, run_dir


def reopen(run_dir: Path) -> tuple[Recipe, Path]:
    """The resolved recipe of a run that is to go on."""
    recipe = load_resolved(run_dir)
    if taken := ports_in_use(recipe):
        raise ConfigError("\n".join([*taken, "(a run that goes on keeps its ports; is it still running?)"]))
    return recipe, run_dir.resolve()


def run(recipe: Recipe, run_dir: Path, console: Console, elsewhere: Sequence[str] = ()) -> Outcome:
    """Run to the end. Ctrl-C and SIGTERM stop what was started and raise ``Interrupted``.

    ``elsewhere``: what to tell when node 0 is up, such as the commands for other nodes.

    Raises ``InfrastructureError`` or ``DeadlineError`` with the last words of the process that failed.
    """
    configure(service="launcher", run_dir=run_dir)
    keys = keys_of(recipe, run_dir)
    renew_in_time(keys)
    operate(keys)
    begun = time.monotonic()
    stop = StopSignal()
    processes = Processes(run_dir, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        warm_start(recipe, run_dir, processes, console, stop)
        _start(recipe, run_dir, processes, console, stop, keys)
        for line in elsewhere:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        _follow(recipe, processes, console, stop, keys)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; go on with it: millrace run --resume {run_dir}") from None
    finally:
        stop.restore()
        processes.stop()
    seconds = time.monotonic() - begun
    summary = _summary(run_dir, seconds)
    return Outcome(run_dir, summary, _picture(run_dir))


def warm_start(recipe: Recipe, run_dir: Path, processes: Processes, console: Console, stop: StopSignal) -> None:
    """Make the starting checkpoints that are missing, one after the other."""
    metrics = run_dir / "metrics" / "warm_start.jsonl"
    for spec in warm_start_commands(recipe, run_dir):
        with console.status(f"{spec.name}: making the starting checkpoint") as status:

            def tick(name: str = spec.name, status: Status = status) -> None:
                stop.check()
                if row := _last_row(metrics):
                    status.update(
                        f"{name}: update {row.get('step')}/{row.get('steps')}, loss {row.get('loss', math.nan):.3f}"
                    )

            processes.run_to_end(with_keys(spec, None), tick)
        last = _last_row(metrics) or {}
        console.print(f"{spec.name} done: {last.get('step', 0)} updates, loss {last.get('loss', math.nan):.3f}")


def _start(
    recipe: Recipe, run_dir: Path, processes: Processes, console: Console, stop: StopSignal, keys: Path | None
) -> None:
    specs = [with_keys(spec, keys) for spec in plan(recipe, run_dir)]
    for spec in specs:
        processes.start(spec)
    _write_pids(run_dir, processes)
    with console.status(f"starting {', '.join(spec.name for spec in specs)}"):
        processes.wait_ready(recipe.launch.ready_timeout_s, stop.check)
    console.print(f"ready: {', '.join(f'{spec.name} {spec.address}' for spec in specs)}")


def _follow(recipe: Recipe, processes: Processes, console: Console, stop: StopSignal, keys: Path | None) -> None:
    address = f"{recipe.orchestrator.host}:{recipe.orchestrator.port}"
    client = OrchestratorClient(address)
    keys_looked_at = time.monotonic()
    finished_at: float | None = None
    try:
        with ProgressView(console, title=str(recipe.run.id)) as view:
            while True:
                stop.check()
                if time.monotonic() - keys_looked_at > KEYS_EVERY_S:
                    keys_looked_at = time.monotonic()
                    if renew_in_time(keys):  # processes take new keys up by themselves, and so does this one
                        operate(keys)
                        client.close()
                        client = OrchestratorClient(address)
                gone = processes.watch()
                if "orchestrator" in gone:
                    break  # it leaves with 0 only when the run is over and everybody has been told
                try:
                    progress = client.get_run().progress
                except InfrastructureError as error:
                    log.debug("orchestrator.silent", error=error.message)  # being restarted, or leaving
                else:
                    view.show(progress)
                    if state_word(progress.state) in ("finished", "stopped"):
                        finished_at = finished_at or time.monotonic()
                if finished_at and time.monotonic() - finished_at > FINISH_TIMEOUT_S:
                    log.warning("orchestrator.lingers", after_s=FINISH_TIMEOUT_S)
                    break
                time.sleep(POLL_S)
    finally:
        client.close()
    _wait_for_farewells(processes, recipe.launch.stop_grace_s)


def _wait_for_farewells(processes: Processes, grace_s: float) -> None:
    """Trainers export and leave, replicas drain and leave, on the orchestrator's word; the gateway stays for ``stop``."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        leaving = {name for name in processes.pids() if name.startswith(("trainer-", "inference-"))}
        if leaving <= processes.watch():
            return
        time.sleep(POLL_S)


def _write_pids(run_dir: Path, processes: Processes) -> None:
    (run_dir / "pids.json").write_text(json.dumps(processes.pids(), indent=1))


def _summary(run_dir: Path, seconds: float) -> dict[str, Any]:
    path = run_dir / "summary.json"
    if not path.exists():
        raise InfrastructureError(f"the orchestrator left no {path}; see {run_dir / 'logs'}")
    summary: dict[str, Any] = json.loads(path.read_text())
    summary["seconds"] = round(seconds, 1)
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
    for key in ("overlap_share", "max_staleness", "seconds", "cpu_seconds"):
        flat[key] = summary.get(key)
    return flat


def _picture(run_dir: Path) -> Path | None:
    from services.cli.plot import plot_runs

    return plot_runs([run_dir], run_dir / "run.png")


def _last_row(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    for line in reversed(lines):
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue  # being written at this moment
        return row
    return None
