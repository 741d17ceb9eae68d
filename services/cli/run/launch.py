"""``rollmill run``: starts a recipe's processes on this node, shows the run, and stops these processes."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.status import Status

from services.cli.check.memory import loading_s
from services.cli.check.recipe import check_worlds, missing_data
from services.cli.console import Interrupted, StopSignal, drawn, say
from services.cli.inspect.run_state import Row, check_can_go_on, ended, launcher_lock, read_rows
from services.cli.keys import (
    act_as,
    check_dates,
    keys_of,
    keys_of_process,
    keys_there,
    operate,
    renew_in_time,
    with_keys,
    write_bundles,
)
from services.cli.plan import (
    WARM_START,
    WORLDS,
    ProcessSpec,
    at_addresses_of,
    bundle_there,
    commands_for_other_nodes,
    gateway_host,
    gateway_process,
    host_of_node_0,
    inference_process,
    listening_host,
    orchestrator_address,
    plan,
    require_port,
    trainer_name,
    trainer_process,
    warm_start_commands,
    with_addresses,
)
from services.cli.run.directory import with_other_ports
from services.cli.run.processes import WATCH_S, ForkServer, Processes, children_cpu_seconds
from services.cli.watch import (
    OrchestratorClient,
    OrchestratorLiveness,
    ProgressView,
    StallsTold,
    TrackersTold,
    show_now,
)
from services.common import run_files
from services.common.config.loading import RESOLVED, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import AccessError, ConfigError, DeadlineError, InfrastructureError, RollmillError
from services.common.net.hosts import address, host_and_port, is_here
from services.common.rpc.client import HEALTH_DEADLINE_S, sync_channel, translated_errors
from services.common.security import identity
from services.common.security.keys import Peer
from services.common.system.devices import inside
from services.common.system.machine import LOOPBACK, num_cores
from services.common.telemetry.logs import LogEvent, configure
from services.common.telemetry.metrics import RunSummary

log = structlog.get_logger()

POLL_S = 0.5
FINISH_TIMEOUT_S = 60.0
KEYS_EVERY_S = 3600.0  # between two looks at how long the run's keys last
_NEEDED = ("trainer-", "envgateway")  # until the run has ended; replicas may leave, as those that are drained do


def run(recipe: Recipe, run_dir: Path, console: Console) -> tuple[RunSummary, Path | None]:
    """Run to the end; returns the summary, and the picture if there is one. Ctrl-C and SIGTERM stop the started processes and
    raise ``Interrupted``.

    Prints the commands for other nodes when node 0 is ready.

    Raises ``InfrastructureError`` or ``DeadlineError`` with the last log lines of the process that failed, and
    ``ConfigError`` when another launcher holds or has ended the run.
    """
    with launcher_lock(run_dir):
        check_can_go_on(run_dir)  # another launcher may have had it until now
        return _run(with_other_ports(recipe, run_dir, console), run_dir, console)


def _run(recipe: Recipe, run_dir: Path, console: Console) -> tuple[RunSummary, Path | None]:
    configure(service="launcher", run_dir=run_dir)
    keys = keys_of(recipe, run_dir)
    renew_in_time(keys)
    if keys is not None:
        write_bundles(recipe, run_dir, keys)
    check_dates(operate(keys))
    begun, load = time.monotonic(), round(os.getloadavg()[0], 2)
    specs = [with_keys(spec, keys) for spec in plan(recipe, run_dir)]
    # One import of torch for warm starts and services.
    forks = ForkServer(run_files.logs(run_dir) / "fork-server.stderr") if any(spec.forked for spec in specs) else None
    with supervised(recipe, run_dir, console, f"go on with it: rollmill run --resume {run_dir}", forks) as (
        processes,
        stop,
    ):
        warm_start(recipe, run_dir, processes, console, stop)
        shared = {
            trainer_name(name, 0) for name, policy in recipe.trained_policies.items() if len(policy.trainer.nodes) > 1
        }
        told = "\n".join(commands_for_other_nodes(recipe, run_dir))
        if told and shared:
            say(console, told)  # their ranks are waited for
        _start(recipe, run_dir, specs, processes, console, stop, shared)
        if told and not shared:
            say(console, told)
        _follow(recipe, run_dir, keys, processes, console, stop)
    summary = _summary(run_dir, time.monotonic() - begun, load)
    from services.cli.inspect.plot import plot_runs  # only at the end

    return summary, drawn(lambda: plot_runs([run_dir], run_dir / "run.png"), console)


@contextmanager
def supervised(
    recipe: Recipe, run_dir: Path, console: Console, onwards: str, forks: ForkServer | None = None
) -> Iterator[tuple[Processes, StopSignal]]:
    """Processes that are stopped at the end of the block, and ``forks`` after them. Ctrl-C and SIGTERM end the block and raise
    ``Interrupted``, which says how the work goes on, ``onwards``; of a run that has ended they end the block alone."""
    processes = Processes(run_dir, recipe.launch.restarts, recipe.launch.stop_grace_s, forks=forks)
    stop = StopSignal()
    try:
        yield processes, stop
    except KeyboardInterrupt:
        if not ended(run_dir):  # else its processes only leave
            names = list(processes.pids())
            trained = ", ".join(name.removeprefix("trainer-") for name in names if name.startswith("trainer-"))
            first = f"writing a checkpoint of {trained}, then " if trained else ""
            ending = f"ending {', '.join(names) or 'processes'} (at most {recipe.launch.stop_grace_s:g} s)"
            say(console, f"stopping: {first}{ending}; Ctrl-C again kills them at once")
            killed = ", ".join(f"{name} (pid {pid})" for name, pid in processes.stop(stop.again()).items())
            told = f"interrupted; killed before the end of its work: {killed}" if killed else "interrupted"
            raise Interrupted(f"{told}; {onwards}") from None
    finally:
        try:
            processes.stop(stop.again())
            _sweep(run_dir)
        finally:
            if forks is not None:
                forks.stop()
            stop.restore()


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
    specs: Sequence[ProcessSpec],
    processes: Processes,
    console: Console,
    stop: StopSignal,
    later: Collection[str],  # processes that cannot be ready before other nodes have come
) -> None:
    # Forked processes come last: they wait for the imports, while the others start.
    for spec in sorted(specs, key=lambda spec: spec.forked):
        processes.start(spec)
    _write_pids(run_dir, processes)
    with closing(OrchestratorClient(orchestrator_address(recipe))) as client:
        stalls = StallsTold(console)

        def tick() -> None:
            stop.check()
            stalls.ask(client)

        with console.status(f"starting {', '.join(spec.name for spec in specs)}"):
            processes.wait_ready(recipe.ready_timeout_s + loading_s(recipe), tick, later, ends_with="orchestrator")
    ready = [spec for spec in specs if spec.name not in later]
    say(console, f"ready: {', '.join(f'{spec.name} {spec.address}' for spec in ready)}")


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
                    if keys is not None and renew_in_time(keys):
                        # Other nodes get new bundles; processes here take the keys up by themselves.
                        write_bundles(recipe, run_dir, keys)
                        operate(keys)
                        client.reconnect()
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
    for key in ("overlap_share", "max_staleness", "seconds", "cpu_seconds", "cores", "load"):
        value = summary.get(key)
        flat[key] = round(value, 4) if isinstance(value, float) else value
    return flat


def _last_row(path: Path, policy: str) -> Row | None:
    rows = (row for row in read_rows(path) if row.get("policy") == policy) if path.exists() else ()
    return next(iter(deque(rows, maxlen=1)), None)


ENVIRONMENTS = "environments"  # below a run's directory: settings and logs of a gateway without a run


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
        return  # made, where the profile wants some, when the recipe was read (services.cli.profiles)
    here = (run_dir or Path(recipe.run.dir) / recipe.name).resolve()
    gateway = recipe.envgateway if process == "envgateway" else None
    if process in (WARM_START, "orchestrator"):
        _make_run(recipe, here, console)
        if process == WARM_START:
            return
        resolved = load_resolved(here)
        keys = keys_of(resolved, here, environment)
        if keys is not None:
            renew_in_time(keys)
            write_bundles(resolved, here, keys)
        for line in commands_for_other_nodes(resolved, here, environment):
            say(console, line)
        _become(_planned(resolved, here, process), keys)
    elif gateway is not None and alone:
        # Below the run's directory, and not in it: a run may lie there, and this is none.
        save_resolved(recipe, here / ENVIRONMENTS)
        keys = keys_there(recipe, here / ENVIRONMENTS, environment)
        _become(gateway_process(gateway, here / ENVIRONMENTS), keys)
    elif process == "envgateway" and (gateway is None or gateway.node == 0):
        check_worlds(recipe)
        _save_once(recipe, here)
        resolved = load_resolved(here)
        _become(_planned(resolved, here, process), keys_of(resolved, here, environment))
    else:
        found = find(recipe, process, run_dir, environment, replica)
        directory = (run_dir or _home(recipe, found.node)).resolve()
        keys = keys_of_process(recipe, process, found.node, directory, console, environment)
        act_as(keys, process)
        if gateway is not None:
            check_worlds(recipe)
            if not (directory / RESOLVED).exists():  # there was no bundle: the keys come from elsewhere
                save_resolved(recipe, directory)
        wait_for_orchestrator(found.orchestrator, console)
        if replica is not None or (found.node == 0 and not found.shared):
            _become(found.process, keys)
        else:
            _watch(found.process, keys, recipe, directory, console)


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
    node_of = {spec.name: node for node in recipe.nodes() for spec in plan(recipe, Path(), node)}
    if process not in node_of:
        raise ConfigError(f"this recipe has no process {process!r}; write one of {', '.join(node_of)}")
    require_port("orchestrator.port", recipe.orchestrator.port)
    node = node_of[process]
    host = host_of_node_0(recipe, process, node, environment)
    orchestrator, home = address(host, recipe.orchestrator.port), (run_dir or _home(recipe, node)).resolve()
    own = listening_host(environment) if node != 0 or not is_here(host) else None
    kind, _, name = process.partition("-")
    shared = False
    if kind == "envgateway":
        assert recipe.envgateway is not None
        reached_at = gateway_host(host, environment)
        spec = gateway_process(recipe.envgateway, home, "--orchestrator", orchestrator, host=reached_at)
    elif kind == "inference":
        more = [] if own is None else ["--run-dir", str(home)]
        more += [] if replica is None else ["--replica-id", replica, "--port", str(recipe.inference[name].port)]
        spec = inference_process(recipe, name, orchestrator, *more, host=own)
    else:
        policy = name if name in recipe.policies else name.rpartition("-node")[0]
        kept_in = () if run_dir is None else ("--run-dir", str(home))
        meeting = host if node else LOOPBACK
        spec = trainer_process(recipe, policy, orchestrator, *kept_in, host=own, node=node, meeting=meeting)
        shared = len(recipe.policies[policy].trainer.nodes) > 1
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
    with supervised(resolved, run_dir, console, "start it again, and the warm start begins anew") as (processes, stop):
        warm_start(resolved, run_dir, processes, console, stop)


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


def _watch(spec: ProcessSpec, keys: Path | None, recipe: Recipe, directory: Path, console: Console) -> None:
    """Wait for the end of the process, restart a killed one, and raise the last output of a failed one."""
    configure(service="launcher", run_dir=directory)
    with supervised(recipe, directory, console, f"start {spec.name} again to go on") as (processes, stop):
        processes.start(with_keys(spec, keys))
        while spec.name not in processes.watch():
            stop.check()
            time.sleep(POLL_S)


ORCHESTRATOR_WAIT_S = 3600.0
CONNECT_S = 3.0
REPORT_S = 30.0


def wait_for_orchestrator(place: str, console: Console, wait_s: float = ORCHESTRATOR_WAIT_S) -> None:
    """Wait until the orchestrator at ``HOST:PORT`` reports SERVING; other processes may start before it.

    Raises:
        ConfigError: the host name cannot be resolved.
        AccessError: our keys or the peer's keys belong to another run, or are not valid now.
        DeadlineError: no orchestrator is ready there within ``wait_s``.
    """
    deadline, told_at = time.monotonic() + wait_s, -math.inf
    while obstacle := _obstacle(place):
        now = time.monotonic()
        if now > deadline:
            raise DeadlineError(
                f"the orchestrator at {place} did not answer within {wait_s:g} s ({obstacle}): is it running "
                "(deploy/launch/2_orchestrator.sh RECIPE), is the address right, and does every firewall between let the port "
                "through? (docs/deploy.md lists the ports)"
            )
        if now - told_at > REPORT_S:
            say(console, f"waiting for the orchestrator at {place}: {obstacle}")
            told_at = now
        time.sleep(POLL_S)


def _obstacle(place: str) -> str:
    """Empty where the orchestrator reports SERVING. Raises errors that waiting cannot fix, such as ``AccessError`` for keys
    of another run."""
    host, port = host_and_port(place)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except socket.gaierror as error:
        raise ConfigError(
            f"this machine cannot resolve the name {host} ({error.strerror}): write a name or address of node 0 that it can"
        ) from None
    except ConnectionRefusedError:
        return f"no process listens at {place} yet"
    except TimeoutError:
        return f"no answer from {host} at port {port}"
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror}"
    if (refusal := identity.refusal(place, identity.current(), Peer.ORCHESTRATOR)) is not None:
        raise refusal
    try:
        with sync_channel(place, Peer.ORCHESTRATOR) as channel, translated_errors(f"orchestrator {place}"):
            request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_DEADLINE_S)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
    except AccessError:
        raise
    except RollmillError:
        pass  # it starts, or is another server
    return f"a server answers at {place}, but no orchestrator that is ready"
