"""``millrace start RECIPE PROCESS``: one process of a recipe, for split launches and other nodes.

On node 0 the process takes this one's place. On another node it is started behind a tunnel to node 0, and both are
watched and stopped together. Each process waits for what it needs, so the order does not matter; the orchestrator makes
what all need, the run directory and the starting checkpoints.
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
from services.cli.nodes import host_of_node_0, needs_tunnel, require_port, tunnel
from services.cli.plan import ProcessSpec, inference_process, plan, trainer_process
from services.cli.processes import Processes
from services.cli.run import warm_start
from services.cli.signals import StopSignal
from services.common.config.loading import RESOLVED, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.logs import configure
from services.common.rpc.health import identify, is_serving

WARM_START = "warm-start"
POLL_S = 0.5
ORCHESTRATOR_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What to start, and what must be there before it."""

    process: ProcessSpec
    orchestrator: str  # the address that it dials
    tunnel: ProcessSpec | None = None


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
    identify()  # to ask whether the orchestrator is there; the process that is started is told by the same variable
    if process == WARM_START:
        _make_run(recipe, (run_dir or Path(recipe.run.dir) / recipe.name).resolve(), console)
    elif process == "orchestrator":
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _make_run(recipe, directory, console)
        _become(_planned(load_resolved(directory), directory, process))
    elif process == "envgateway":
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _save_once(recipe, directory)
        _become(_planned(load_resolved(directory), directory, process))
    else:
        found = find(recipe, process, run_dir, environment)
        if found.tunnel is None:
            _wait_for(found.orchestrator, console)
            _become(found.process)
        else:
            _behind(found.tunnel, found.process, recipe, run_dir or Path(recipe.run.dir) / f"{recipe.name}-{process}")


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
    far = needs_tunnel(host)
    address = f"{recipe.orchestrator.host if far else host}:{recipe.orchestrator.port}"
    if kind == "inference":
        spec = inference_process(recipe, name, address)
    else:
        more = () if run_dir is None else ("--run-dir", str(run_dir.resolve()))
        spec = trainer_process(recipe, name, address, *more)
    return Started(process=spec, orchestrator=address, tunnel=tunnel(recipe, host) if far else None)


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
        save_resolved(recipe.model_copy(update={"run": run}), run_dir)


def _wait_for(orchestrator: str, console: Console) -> None:
    """Until the orchestrator answers; it may be making starting checkpoints, and whoever it is may come first."""
    deadline = time.monotonic() + ORCHESTRATOR_WAIT_S
    told = False
    while not is_serving(orchestrator):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the orchestrator at {orchestrator} did not answer within {ORCHESTRATOR_WAIT_S:g} s: is it running, and "
                "is the address right? (deploy/launch/2_orchestrator.sh RECIPE)"
            )
        if not told:
            console.print(f"waiting for the orchestrator at {orchestrator}", highlight=False, soft_wrap=True)
            told = True
        time.sleep(POLL_S)


def _planned(recipe: Recipe, run_dir: Path, process: str) -> ProcessSpec:
    found = next((spec for spec in plan(recipe, run_dir) if spec.name == process), None)
    if found is None:
        raise ConfigError(f"this recipe has no process {process!r}")
    return found


def _become(spec: ProcessSpec) -> None:
    """Signals and exit codes are then the process's own."""
    os.execve(spec.argv[0], list(spec.argv), {**os.environ, **spec.env})


def _behind(way: ProcessSpec, spec: ProcessSpec, recipe: Recipe, directory: Path) -> None:
    """The process behind its tunnel: both are started again when they are killed, and stopped together."""
    directory = directory.resolve()
    configure(service="launcher", run_dir=directory)
    stop = StopSignal()
    processes = Processes(directory, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        processes.start(way)
        processes.wait_ready(recipe.launch.ready_timeout_s, stop.check)
        processes.start(spec)
        while spec.name not in _ended(processes, way):
            stop.check()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped {spec.name}") from None
    finally:
        stop.restore()
        processes.stop()


def _ended(processes: Processes, way: ProcessSpec) -> set[str]:
    ended = processes.watch()
    if way.name in ended:
        raise InfrastructureError("the tunnel to node 0 was closed")
    return ended


def _nodes(recipe: Recipe) -> Sequence[int]:
    return sorted({0, *(service.node for service in recipe.inference.values())})
