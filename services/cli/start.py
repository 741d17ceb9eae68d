"""``millrace start RECIPE PROCESS``: one process of a recipe, for split launches and other nodes.

On node 0 the process takes this one's place. On another node it is watched from here, because no launcher is there to
start it again when it is killed. Each process waits for what it needs, so the order does not matter; the orchestrator
makes what all need: the run directory, its keys, the starting checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.cli.errors import Interrupted
from services.cli.launch_checks import missing_data
from services.cli.nodes import (
    bundle_there,
    commands_for_other_nodes,
    host_of_node_0,
    listening_host,
    require_port,
    with_addresses,
)
from services.cli.plan import ProcessSpec, inference_process, plan, trainer_process
from services.cli.processes import Processes
from services.cli.reach import wait_for_orchestrator
from services.cli.run import warm_start
from services.cli.run_keys import act_as, keys_of_process, keys_of_run, role_of, with_keys
from services.cli.signals import StopSignal
from services.common.config.loading import RESOLVED, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.hosts import address, is_here
from services.common.logs import configure

WARM_START = "warm-start"
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What to start, and what must be there before it."""

    process: ProcessSpec
    orchestrator: str  # the address that it dials
    node: int


def start(
    recipe: Recipe,
    process: str,
    run_dir: Path | None,
    console: Console,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Start a process by its name in the plan and stay until it ends.

    ``run_dir``: where the orchestrator keeps the run, and a trainer its checkpoints when it does not see that directory.

    Raises:
        ConfigError: no such process, a port nobody can know, or node 0 is not named.
    """
    if process == WARM_START:
        _make_run(recipe, (run_dir or Path(recipe.run.dir) / recipe.name).resolve(), console)
    elif process == "orchestrator":
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _make_run(recipe, directory, console)
        resolved = load_resolved(directory)
        keys = keys_of_run(resolved, directory, environment)
        for line in commands_for_other_nodes(resolved, directory, environment):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        _become(_planned(resolved, directory, process), keys)
    elif process == "envgateway":
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _save_once(recipe, directory)
        resolved = load_resolved(directory)
        _become(_planned(resolved, directory, process), keys_of_run(resolved, directory, environment))
    else:
        found = find(recipe, process, run_dir, environment)
        directory = (run_dir or _home(recipe, found.node)).resolve()
        keys = keys_of_process(recipe, process, found.node, directory, console, environment)
        act_as(keys, role_of(process))
        wait_for_orchestrator(found.orchestrator, recipe.launch.ready_timeout_s, console)
        if found.node == 0:
            _become(found.process, keys)
        else:
            _watch(found.process, keys, recipe, directory)


def find(recipe: Recipe, process: str, run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> Started:
    """The command line of an inference service or trainer, with the address at which it finds the orchestrator."""
    kind, _, name = process.partition("-")
    known: dict[str, Mapping[str, object]] = {"inference": recipe.inference, "trainer": recipe.policies}
    if name not in known.get(kind, {}):
        names = [spec.name for node in _nodes(recipe) for spec in plan(recipe, Path(), node)]
        raise ConfigError(f"this recipe has no process {process!r}; write one of {', '.join(names)}")
    require_port("orchestrator.port", recipe.orchestrator.port)
    node = recipe.inference[name].node if kind == "inference" else 0
    host = host_of_node_0(recipe, process, node, environment)
    orchestrator = address(host, recipe.orchestrator.port)
    own = listening_host(environment)
    far = node != 0 or not is_here(host)
    if kind == "inference" and far:
        place = str((run_dir or _home(recipe, node)).resolve())
        spec = inference_process(recipe, name, orchestrator, "--run-dir", place, host=own)
    elif kind == "inference":
        spec = inference_process(recipe, name, orchestrator)
    else:
        more = () if run_dir is None else ("--run-dir", str(run_dir.resolve()))
        spec = trainer_process(recipe, name, orchestrator, *more, host=own if far else host)
    return Started(process=spec, orchestrator=orchestrator, node=node)


def _home(recipe: Recipe, node: int) -> Path:
    """Where a process keeps what it has of the run when nobody says so."""
    return bundle_there(recipe, node) if node else Path(recipe.run.dir) / recipe.name


def _make_run(recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Refuse what could only fail later, write the resolved recipe, and make the starting checkpoints."""
    if problems := missing_data(recipe):
        raise ConfigError("\n".join(problems))
    if (run_dir / RESOLVED).exists():
        console.print(f"going on with the run in {run_dir}", highlight=False, soft_wrap=True)
    _save_once(recipe, run_dir)
    configure(service="launcher", run_dir=run_dir)
    resolved = load_resolved(run_dir)
    stop = StopSignal()
    processes = Processes(run_dir, resolved.launch.restarts, resolved.launch.stop_grace_s)
    try:
        warm_start(resolved, run_dir, processes, console, stop)
    except KeyboardInterrupt:
        raise Interrupted("stopped during the warm start; start it again and it begins anew") from None
    finally:
        stop.restore()
        processes.stop()


def _save_once(recipe: Recipe, run_dir: Path) -> None:
    """The resolved recipe of a run, written by whoever comes first: two that come at once write the same."""
    require_port("orchestrator.port", recipe.orchestrator.port)
    if recipe.envgateway is not None:
        require_port("envgateway.port", recipe.envgateway.port)
    if not (run_dir / RESOLVED).exists():
        run = recipe.run.model_copy(update={"id": recipe.run.id or run_dir.name})
        save_resolved(with_addresses(recipe).model_copy(update={"run": run}), run_dir)


def _planned(recipe: Recipe, run_dir: Path, process: str) -> ProcessSpec:
    found = next((spec for spec in plan(recipe, run_dir) if spec.name == process), None)
    if found is None:
        raise ConfigError(f"this recipe has no process {process!r}")
    return found


def _become(spec: ProcessSpec, keys: Path | None) -> None:
    """Signals and exit codes are then the process's own."""
    spec = with_keys([spec], keys)[0]
    os.execve(spec.argv[0], list(spec.argv), {**os.environ, **spec.env})


def _watch(spec: ProcessSpec, keys: Path | None, recipe: Recipe, directory: Path) -> None:
    """Until the process has ended, with its last words if it failed; started again when it was killed."""
    configure(service="launcher", run_dir=directory)
    stop = StopSignal()
    processes = Processes(directory, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        processes.start(with_keys([spec], keys)[0])
        while spec.name not in processes.watch():
            stop.check()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped {spec.name}") from None
    finally:
        stop.restore()
        processes.stop()


def _nodes(recipe: Recipe) -> Sequence[int]:
    return sorted({0, *(service.node for service in recipe.inference.values())})
