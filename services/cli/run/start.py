"""``rollmill start RECIPE PROCESS``: runs one process of a recipe, for split launches and other nodes.

On node 0 the process replaces this one. On another node this command supervises the process, because there is no
launcher that would restart the process. Each process waits for its dependencies, so the order does not matter; the
orchestrator makes the shared files: the run directory, its keys, the starting checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.cli.check.launch import check_worlds, missing_data
from services.cli.console import Interrupted, StopSignal, say
from services.cli.keys.process_keys import (
    act_as,
    keys_of,
    keys_of_process,
    keys_there,
    renew_in_time,
    with_keys,
    write_bundles,
)
from services.cli.plan.nodes import (
    at_addresses_of,
    bundle_there,
    commands_for_other_nodes,
    gateway_host,
    host_of_node_0,
    listening_host,
    require_port,
    with_addresses,
)
from services.cli.plan.specs import ProcessSpec, gateway_process, inference_process, plan, trainer_name, trainer_process
from services.cli.run.launch import warm_start
from services.cli.run.processes import Processes
from services.cli.run.wait_ready import wait_for_orchestrator
from services.common.config.reading.loading import RESOLVED, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.net.hosts import address, is_here
from services.common.system.devices import inside
from services.common.system.free_ports import LOOPBACK
from services.common.telemetry.logs import configure

WARM_START = "warm-start"
ENVIRONMENTS = "environments"  # below a run's directory: settings and logs of a gateway without a run
WORLDS = "worlds"
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The process to start, and its prerequisites."""

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
    replica: str | None = None,
) -> None:
    """Start a process by its name in the plan and wait for its end.

    ``run_dir``: where the orchestrator keeps the run, and a trainer without access to that directory its checkpoints.
    ``alone``: the gateway for clients other than a run, until stopped.
    ``replica``: the id of one more replica of an inference service, which a scheduler starts again when it ends.

    Raises:
        ConfigError: no such process, a port that is not known, or node 0 is not named.
    """
    if replica is not None and not process.startswith("inference-"):
        raise ConfigError(
            f"--replica-id names one more replica of an inference service: write inference-NAME, not {process}"
        )
    if alone and process != "envgateway":
        raise ConfigError(f"--alone starts environments without a run: write envgateway instead of {process}")
    if process == WORLDS:
        return  # made, where the profile wants some, when the recipe was read (services.cli.plan.profiles)
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
            say(console, line)
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
        found = find(recipe, process, run_dir, environment, replica)
        directory = (run_dir or _home(recipe, found.node)).resolve()
        keys = keys_of_process(recipe, process, found.node, directory, console, environment)
        act_as(keys, process)
        if process == "envgateway":
            check_worlds(recipe)
            if not (directory / RESOLVED).exists():  # there was no bundle: the keys come from elsewhere
                save_resolved(recipe, directory)
        wait_for_orchestrator(found.orchestrator, recipe.launch.ready_timeout_s, console)
        if replica is not None or (found.node == 0 and not found.shared):
            _become(found.process, keys)
        else:
            _watch(found.process, keys, recipe, directory)


def find(
    recipe: Recipe,
    process: str,
    run_dir: Path | None,
    environment: Mapping[str, str] = os.environ,
    replica: str | None = None,
) -> Started:
    """The command line of an inference service, a trainer or the gateway of another node, with the address at which the
    process finds the orchestrator.

    ``replica``: the id of one more replica of the service, at the port that ``recipe`` gives it on this machine."""
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
    more = [] if replica is None else ["--replica-id", replica, "--port", str(recipe.inference[name].port)]
    if not policy and far:
        home = str((run_dir or _home(recipe, node)).resolve())
        spec = inference_process(recipe, name, orchestrator, "--run-dir", home, *more, host=own)
    elif not policy:
        spec = inference_process(recipe, name, orchestrator, *more)
    else:
        kept_in = () if run_dir is None else ("--run-dir", str(run_dir.resolve()))
        meeting = host if node else LOOPBACK
        listening = own if far else None
        spec = trainer_process(recipe, policy, orchestrator, *kept_in, host=listening, node=node, meeting=meeting)
    shared = bool(policy) and len(recipe.policies[policy].trainer.nodes) > 1
    return Started(process=spec, orchestrator=orchestrator, node=node, shared=shared)


def _home(recipe: Recipe, node: int) -> Path:
    """The default directory of a process for its files of the run."""
    return bundle_there(recipe, node) if node else Path(recipe.run.dir) / recipe.name


def _make_run(recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Check the launch, write the resolved recipe, and make the starting checkpoints."""
    if problems := missing_data(recipe):
        raise ConfigError("\n".join(problems))
    if (run_dir / RESOLVED).exists():
        say(console, f"going on with the run in {run_dir}")
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
        processes.stop(stop.again())
        stop.restore()


def _save_once(recipe: Recipe, run_dir: Path) -> None:
    """The resolved recipe of a run, written by the first process; two at the same time write the same. A run that goes on
    at another address, as a scheduler may place it, gets that address."""
    require_port("orchestrator.port", recipe.orchestrator.port)
    if recipe.envgateway is not None and recipe.envgateway.node == 0:
        require_port("envgateway.port", recipe.envgateway.port)
    named = with_addresses(recipe)
    if not (run_dir / RESOLVED).exists():
        run = recipe.run.model_copy(update={"id": recipe.run.id or run_dir.name})
        save_resolved(named.model_copy(update={"run": run}), run_dir)
    elif (moved := at_addresses_of(load_resolved(run_dir), named)) is not None:
        save_resolved(moved, run_dir)


def _planned(recipe: Recipe, run_dir: Path, process: str) -> ProcessSpec:
    found = next((spec for spec in plan(recipe, run_dir) if spec.name == process), None)
    if found is None:
        raise ConfigError(f"this recipe has no process {process!r}")
    return found


def _become(spec: ProcessSpec, keys: Path | None) -> None:
    """Signals and exit codes are then the process's own."""
    spec = with_keys(spec, keys)
    os.execve(spec.argv[0], list(spec.argv), inside(os.environ, spec.env, spec.name))


def _watch(spec: ProcessSpec, keys: Path | None, recipe: Recipe, directory: Path) -> None:
    """Wait for the end of the process, restart a killed one, and raise the last output of a failed one."""
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
        processes.stop(stop.again())
        stop.restore()
