"""``millrace start RECIPE PROCESS``: one process of a recipe, for split launches and other nodes.

On node 0 the process takes this one's place. On another node it is watched from here, because no launcher is there to
start it again when it is killed. Each process waits for what it needs, so the order does not matter; the orchestrator
makes what all need: the run directory, its keys, the starting checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.cli.errors import Interrupted
from services.cli.first_contact import wait_for_orchestrator
from services.cli.launch_checks import check_worlds, missing_data
from services.cli.launch_keys import act_as, keys_of, keys_there, renew_in_time, with_keys
from services.cli.node_bundles import keys_of_process, write_bundles
from services.cli.nodes import (
    bundle_there,
    commands_for_other_nodes,
    gateway_host,
    host_of_node_0,
    listening_host,
    require_port,
    with_addresses,
)
from services.cli.plan import ProcessSpec, gateway_process, inference_process, plan, trainer_name, trainer_process
from services.cli.processes import Processes
from services.cli.run import warm_start
from services.cli.signals import StopSignal
from services.common.config.loading import RESOLVED, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.free_ports import LOOPBACK
from services.common.hosts import address, is_here
from services.common.logs import configure

WARM_START = "warm-start"
ENVIRONMENTS = "environments"  # below a run's directory: settings and logs of a gateway without a run
WORLDS = "worlds"
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What to start, and what must be there before it."""

    process: ProcessSpec
    orchestrator: str  # the address that it dials
    node: int
    shared: bool = False  # with other nodes: when one of them is lost, it is started again here


def start(
    recipe: Recipe,
    process: str,
    run_dir: Path | None,
    console: Console,
    environment: Mapping[str, str] = os.environ,
    *,
    alone: bool = False,
) -> None:
    """Start a process by its name in the plan and stay until it ends.

    ``run_dir``: where the orchestrator keeps the run, and a trainer its checkpoints when it does not see that directory.
    ``alone``: the gateway, for other clients than a run's, until it is stopped.

    Raises:
        ConfigError: no such process, a port nobody can know, or node 0 is not named.
    """
    if alone and process != "envgateway":
        raise ConfigError(f"--alone starts environments without a run: write envgateway instead of {process}")
    if process == WORLDS:
        return  # made, where the profile wants some, when the recipe was read (services.cli.here)
    if process == WARM_START:
        _make_run(recipe, (run_dir or Path(recipe.run.dir) / recipe.name).resolve(), console)
    elif process == "orchestrator":
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _make_run(recipe, directory, console)
        resolved = load_resolved(directory)
        keys = keys_of(resolved, directory, environment)
        if keys is not None:
            renew_in_time(keys)
            write_bundles(resolved, directory, keys)
        for line in commands_for_other_nodes(resolved, directory, environment):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        _become(_planned(resolved, directory, process), keys)
    elif process == "envgateway" and recipe.envgateway is not None and alone:
        # Below the run's directory, and not in it: a run may lie there, and this is none.
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve() / ENVIRONMENTS
        save_resolved(recipe, directory)
        _become(gateway_process(recipe.envgateway, directory), keys_there(recipe, directory, environment))
    elif process == "envgateway" and (recipe.envgateway is None or recipe.envgateway.node == 0):
        check_worlds(recipe)
        directory = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
        _save_once(recipe, directory)
        resolved = load_resolved(directory)
        _become(_planned(resolved, directory, process), keys_of(resolved, directory, environment))
    else:
        found = find(recipe, process, run_dir, environment)
        directory = (run_dir or _home(recipe, found.node)).resolve()
        keys = keys_of_process(recipe, process, found.node, directory, console, environment)
        act_as(keys, process)
        if process == "envgateway":
            check_worlds(recipe)
            if not (directory / RESOLVED).exists():  # there was no bundle: the keys come from elsewhere
                save_resolved(recipe, directory)
        wait_for_orchestrator(found.orchestrator, recipe.launch.ready_timeout_s, console)
        if found.node == 0 and not found.shared:
            _become(found.process, keys)
        else:
            _watch(found.process, keys, recipe, directory)


def find(recipe: Recipe, process: str, run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> Started:
    """The command line of an inference service, a trainer or the gateway of another node, with the address at which it finds
    the orchestrator."""
    kind, _, name = process.partition("-")
    shares = {
        trainer_name(p, n): (p, n) for p, section in recipe.trained_policies.items() for n in section.trainer.nodes
    }
    gateway = recipe.envgateway if process == "envgateway" else None
    if gateway is None and process not in shares and (kind != "inference" or name not in recipe.inference):
        names = [spec.name for node in recipe.nodes() for spec in plan(recipe, Path(), node)]
        raise ConfigError(f"this recipe has no process {process!r}; write one of {', '.join(names)}")
    require_port("orchestrator.port", recipe.orchestrator.port)
    policy, node = shares.get(process, ("", 0))
    if not policy:
        node = gateway.node if gateway is not None else recipe.inference[name].node
    host = host_of_node_0(recipe, process, node, environment)
    orchestrator = address(host, recipe.orchestrator.port)
    if gateway is not None:
        kept = (run_dir or _home(recipe, node)).resolve()
        reached_at = gateway_host(host, environment)
        spec = gateway_process(gateway, kept, "--orchestrator", orchestrator, host=reached_at)
        return Started(process=spec, orchestrator=orchestrator, node=node)
    own = listening_host(environment)
    far = node != 0 or not is_here(host)
    if not policy and far:
        home = str((run_dir or _home(recipe, node)).resolve())
        spec = inference_process(recipe, name, orchestrator, "--run-dir", home, host=own)
    elif not policy:
        spec = inference_process(recipe, name, orchestrator)
    else:
        more = () if run_dir is None else ("--run-dir", str(run_dir.resolve()))
        meeting = host if node else LOOPBACK
        listening = own if far else None
        spec = trainer_process(recipe, policy, orchestrator, *more, host=listening, node=node, meeting=meeting)
    shared = bool(policy) and len(recipe.policies[policy].trainer.nodes) > 1
    return Started(process=spec, orchestrator=orchestrator, node=node, shared=shared)


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
    if recipe.envgateway is not None and recipe.envgateway.node == 0:
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
    spec = with_keys(spec, keys)
    os.execve(spec.argv[0], list(spec.argv), {**os.environ, **spec.env})


def _watch(spec: ProcessSpec, keys: Path | None, recipe: Recipe, directory: Path) -> None:
    """Until the process has ended, with its last words if it failed; started again when it was killed."""
    configure(service="launcher", run_dir=directory)
    stop = StopSignal()
    processes = Processes(directory, recipe.launch.restarts, recipe.launch.stop_grace_s)
    try:
        processes.start(with_keys(spec, keys))
        while spec.name not in processes.watch():
            stop.check()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped {spec.name}") from None
    finally:
        stop.restore()
        processes.stop()
