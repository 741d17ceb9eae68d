"""Lists the processes that a recipe needs on this node, with their command lines. Starts no process."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.loading import set_at
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.errors import ConfigError
from services.common.installing import IN_CHECKOUT
from services.common.net.hosts import address, is_here, is_loopback
from services.common.system.child import module_command, module_in
from services.common.system.machine import LOOPBACK, free_ports, is_free

# Names that `rollmill start` takes beside those of processes: what is made before a run, once.
WARM_START = "warm-start"
WORLDS = "worlds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run."""

    name: str
    argv: tuple[str, ...]
    address: str  # where its health service answers
    forked: bool = False  # from a process that has its imports, instead of an interpreter of its own
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command as people write it."""
        module, arguments = module_in(self.argv)
        return " ".join(["python", "-m", module, *arguments])


def plan(recipe: Recipe, run_dir: Path, node: int = 0) -> list[ProcessSpec]:
    """Every process of the run on one node, orchestrator first. Other nodes have inference services, shares of
    trainers, and the gateway where the recipe says so.

    Start-up order does not matter: each waits for its dependencies.
    """
    orchestrator = orchestrator_address(recipe)
    services = [
        inference_process(recipe, name, orchestrator)
        for name, service in recipe.inference.items()
        if service.node == node
    ]
    trainers = [
        trainer_process(recipe, policy, orchestrator, "--run-dir", str(run_dir), node=node)
        for policy, section in (
            recipe.trained_policies.items() if recipe.run.steps else ()
        )  # without steps it only evaluates
        if node in section.trainer.nodes
    ]
    specs = []
    if node == 0:
        argv = ("services.orchestrator", "--run-dir", str(run_dir))
        specs.append(_spec("orchestrator", orchestrator, *argv))
    if recipe.envgateway is not None and recipe.envgateway.node == node:
        specs.append(gateway_process(recipe.envgateway, run_dir, "--orchestrator", orchestrator))
    return [*specs, *services, *trainers]


def orchestrator_address(recipe: Recipe) -> str:
    """Where node 0 itself finds the orchestrator."""
    return address(recipe.orchestrator.host, recipe.orchestrator.port)


def gateway_process(gateway: EnvGatewayConfig, run_dir: Path, *more: str, host: str | None = None) -> ProcessSpec:
    """The environment gateway with the settings in ``run_dir``; ``host`` is a bind address other than the recipe's."""
    own = () if host is None else ("--host", host)
    where = address(host or gateway.host, gateway.port)
    argv = ("services.envgateway", "--run-dir", str(run_dir), *own, *more)
    return _spec("envgateway", where, *argv)


def inference_process(recipe: Recipe, name: str, orchestrator: str, *more: str, host: str | None = None) -> ProcessSpec:
    """One inference service, dialling the orchestrator at this address; ``host`` is a bind address other than the recipe's."""
    service = recipe.inference[name]
    own = () if host is None else ("--host", host)
    return _spec(
        f"inference-{name}",
        address(host or service.host, service.port),
        *("services.inference", "--name", name, "--orchestrator", orchestrator, *own, *more),
        threads=service.threads,
        gpus=service.gpus,
        # A process that may use a GPU starts on its own, and so does one that imports no torch.
        forked=service.engine in ("torch", "forced") and service.device == "cpu",
    )


def trainer_name(policy: str, node: int) -> str:
    """The name of a trainer's process on one of its nodes."""
    return f"trainer-{policy}" if node == 0 else f"trainer-{policy}-node{node}"


def trainer_process(
    recipe: Recipe,
    policy: str,
    orchestrator: str,
    *more: str,
    host: str | None = None,
    node: int = 0,
    meeting: str = LOOPBACK,
) -> ProcessSpec:
    """The trainer of one policy, its ranks under one launcher; ``host``: where its versions are fetched, if not as the
    recipe says.

    Of a trainer over several nodes, the share of ``node``; its ranks meet those of node 0 at the host ``meeting``.
    """
    trainer = recipe.policies[policy].trainer
    num_nodes = len(trainer.nodes)
    own = () if host is None else ("--host", host)
    module = ["services.trainer"]
    if trainer.num_ranks > 1:
        module = ["services.trainer.launch_ranks", f"--num-ranks={trainer.num_ranks // num_nodes}"]
        if trainer.rendezvous_port:
            module.append(f"--rendezvous-port={trainer.rendezvous_port}")
    if num_nodes > 1:
        place = (f"--num-nodes={num_nodes}", f"--node-rank={trainer.nodes.index(node)}", f"--rendezvous-host={meeting}")
        module += [*place, f"--interface={trainer.interface}"]
    return _spec(
        trainer_name(policy, node),
        address(LOOPBACK, trainer.port) if node == 0 else "",  # the first rank answers for all
        *(*module, "--policy", policy, "--orchestrator", orchestrator, *own, *more),
        threads=trainer.threads,
        gpus=trainer.gpus,
        forked=trainer.num_ranks == 1 and trainer.device == "cpu",
    )


def warm_start_commands(recipe: Recipe, run_dir: Path) -> list[ProcessSpec]:
    """The processes that make the starting checkpoints which are not there yet, one for each policy."""
    return [
        _spec(
            f"warm-start-{policy}",
            "",
            *("services.trainer.warm_start", "--policy", policy, "--run-dir", str(run_dir)),
            threads=recipe.policies[policy].trainer.threads,
            forked=recipe.policies[policy].trainer.device == "cpu",
        )
        for policy in recipe.warm_start
        if not (warm_start_dir(run_dir, policy) / "config.json").exists()
    ]


def with_free_ports(recipe: Recipe) -> Recipe:
    """The same recipe with every port 0 replaced by a free one, so that the resolved recipe names real addresses.

    Services of other nodes find one for themselves.
    """
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    sections = _of_node_0(tree)
    open_sections = {name: section for name, section in sections.items() if section["port"] == 0}
    hosts = sorted({LOOPBACK, *(section["host"] for section in sections.values() if "host" in section)})
    named = {port for _, port in recipe.ports()}  # of processes that are not listening yet
    for section, port in zip(open_sections.values(), free_ports(len(open_sections), hosts, named), strict=True):
        section["port"] = port
    chosen = {*recipe.launch.chosen_ports, *(f"{name}.port" for name in open_sections)}
    tree["launch"]["chosen_ports"] = sorted(chosen)
    return Recipe.model_validate(tree)


def _of_node_0(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a recipe's tree that listen on node 0, by their paths."""
    found = {"orchestrator": tree["orchestrator"]}
    found |= {f"inference.{name}": each for name, each in tree["inference"].items() if each["node"] == 0}
    if tree["envgateway"] and tree["envgateway"]["node"] == 0:
        found["envgateway"] = tree["envgateway"]
    for name, policy in tree["policies"].items():
        found |= {f"policies.{name}.{part}": policy[part] for part in ("trainer", "weights")}
    return found


def taken_ports(recipe: Recipe) -> list[tuple[str, int]]:
    """Settings with a port that another process holds on this machine, node 0, and that port."""
    elsewhere = [f"inference.{name}." for name, service in recipe.inference.items() if service.node != 0]
    elsewhere += ["envgateway."] if recipe.envgateway and recipe.envgateway.node != 0 else []
    hosts = recipe.hosts
    taken = []
    for where, port in recipe.ports():
        host = hosts.get(f"{where.removesuffix('.port')}.host", LOOPBACK)
        if port and not where.startswith(tuple(elsewhere)) and is_here(host) and not is_free(port, host):
            taken.append((where, port))
    return taken


def ports_in_use(recipe: Recipe) -> list[str]:
    """One line for each of ``taken_ports``, with the remedy."""
    return [
        f"{where}: port {port} is in use; stop the process that holds it or run with --set {where}=0"
        for where, port in taken_ports(recipe)
    ]


def _spec(
    name: str,
    address: str,
    module: str,
    *arguments: str,
    threads: int = 1,
    gpus: Sequence[int] = (),
    forked: bool = False,
) -> ProcessSpec:
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return ProcessSpec(
        name=name,
        argv=module_command(module, *arguments),
        address=address,
        env=env,
        forked=forked and threads == 1 and not gpus,  # the number of threads is read when torch is imported
    )


HOST_VARIABLE = "ORCHESTRATOR_HOST_EXTERNAL"
NODE_HOST = "NODE_HOST"
BUNDLES = "nodes"  # in the run directory: the bundle of each other node
SCRIPTS = {
    "envgateway": "deploy/launch/0_environment.sh",
    "inference-a": "deploy/launch/1_inference_a.sh",
    "inference-b": "deploy/launch/1_inference_b.sh",
}
_NOWHERE = "192.0.2.1"  # an address of documentation
_DISCARD = 9  # any port: nothing is sent there


def other_nodes(recipe: Recipe) -> list[int]:
    """The nodes beside node 0 that a recipe names."""
    return recipe.nodes()[1:]


def with_addresses(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> Recipe:
    """The same recipe with the address of this node, node 0, in place of loopback wherever another node dials in.

    A recipe of node 0 alone stays the same.

    Raises:
        ConfigError: this node has no address that others could dial, or the one that is named is not its own.
    """
    if not other_nodes(recipe):
        return recipe
    here = address_of_node_0(environment)
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    for section in _of_node_0(tree).values():
        if is_loopback(section.get("host", "")):
            section["host"] = here
    return Recipe.model_validate(tree)


def at_addresses_of(recipe: Recipe, named: Recipe) -> Recipe | None:
    """The resolved recipe of a run over several nodes with the hosts of ``named``, for a node 0 that has moved; None if
    they are the same."""
    if not other_nodes(recipe) or recipe.hosts == named.hosts:
        return None
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    for path, host in named.hosts.items():
        set_at(tree, path.split("."), host)
    return Recipe.model_validate(tree)


def address_of_node_0(environment: Mapping[str, str] = os.environ) -> str:
    """The address of this machine that other nodes dial: of the name in NODE_HOST or ORCHESTRATOR_HOST_EXTERNAL, else
    of its host name, else the address of its outgoing connections.

    Raises:
        ConfigError: as ``with_addresses``.
    """
    own = _named_address(environment, NODE_HOST, HOST_VARIABLE)
    own = own or _address_here(socket.gethostname()) or _outward_address()
    if own is None:
        raise ConfigError(
            f"this recipe has processes on other nodes, but {socket.gethostname()} leads to no address that they could dial: set "
            f"{NODE_HOST} to the name or address of this machine that they reach"
        )
    return own


def _named_address(environment: Mapping[str, str], *variables: str) -> str | None:
    """The address of this machine that the first variable with a value names; None where none has one.

    Raises:
        ConfigError: it is no name of this machine, or leads to loopback.
    """
    variable = next((each for each in variables if environment.get(each)), None)
    if variable is None:
        return None
    if (own := _address_here(environment[variable])) is None:
        found = ", ".join(_addresses(environment[variable])) or "no address"
        raise ConfigError(
            f"{variable} is {environment[variable]}, which leads to {found}: it must be a name or address of this machine that the "
            "other nodes reach (`ip -brief address` lists them)"
        )
    return own


def _address_here(name: str) -> str | None:
    """The first address of a name that is this machine's and no loopback."""
    return next((each for each in _addresses(name) if not is_loopback(each) and is_here(each)), None)


def name_of_node_0(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> str:
    """The name of node 0 for other nodes: the configured one, else its host name if that resolves to node 0, else its
    address."""
    given = environment.get(HOST_VARIABLE) or environment.get(NODE_HOST)
    if given:
        return given
    own = socket.gethostname()
    return own if recipe.orchestrator.host in _addresses(own) else recipe.orchestrator.host


def commands_for_other_nodes(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Commands to paste on every other node: one fetches its bundle from here, one starts its processes.

    ``recipe`` is the resolved one of ``run_dir``. The commands may be repeated, and continue after any failure.
    """
    name = name_of_node_0(recipe, environment)
    lines = []
    for node in other_nodes(recipe):
        if not (run_dir / BUNDLES / str(node)).is_dir():
            continue  # its keys come from the owner of the authority
        here = shlex.quote(str(bundle_there(recipe, node)))
        there = shlex.quote(shlex.quote(str(run_dir / BUNDLES / str(node))))  # for this shell, and for that of ssh
        lines += [
            f"paste on node {node}, {'in a checkout' if IN_CHECKOUT else 'with Rollmill'} of the same version (ssh copies its keys and settings of this run):",
            f"  mkdir -p {here} && ssh {shlex.quote(name)} tar -C {there} -ch . | tar -C {here} -xp",
        ]
        starts = []
        for process in (spec.name for spec in plan(recipe, run_dir, node)):
            role = process.partition("-")[0]
            variables = f"{HOST_VARIABLE}={shlex.quote(name)} ROLLMILL_KEYS={here}/keys/{role}"
            script = SCRIPTS.get(process) if IN_CHECKOUT else None
            command = f"{script} {here}" if script else f"rollmill start {here} {process}"
            starts.append(f"{variables} {command}")
        lines.append(f"  {starts[0]}" if len(starts) == 1 else f"  ({' & '.join(starts)} & wait)")
    return lines


def bundle_there(recipe: Recipe, node: int) -> Path:
    """The directory of another node that holds its files of the run, relative to its checkout."""
    return Path("runs") / f"{recipe.run.id or recipe.name}-node{node}"


def host_of_node_0(recipe: Recipe, process: str, node: int, environment: Mapping[str, str] = os.environ) -> str:
    """The address at which a process of a node finds node 0; on node 0 the recipe's own host.

    Raises:
        ConfigError: the process is on another node, and the address of node 0 is not given.
    """
    host = environment.get(HOST_VARIABLE, "")
    if node == 0 and (not host or is_here(host)):
        return with_addresses(recipe, environment).orchestrator.host
    if host:
        return host
    raise ConfigError(
        f"{process} runs on node {node} and must know where node 0 is: set {HOST_VARIABLE} to the host name of the node "
        f"that runs the orchestrator ({HOST_VARIABLE}=node0 ...; `rollmill run` on node 0 prints the whole command)"
    )


def listening_host(environment: Mapping[str, str] = os.environ) -> str:
    """The address at which processes of another node listen: NODE_HOST, else loopback, which other nodes cannot reach.

    Raises:
        ConfigError: it is no address of this machine.
    """
    return _named_address(environment, NODE_HOST) or LOOPBACK


def gateway_host(node_0: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address at which the gateway of another node listens: NODE_HOST, else the one with which this machine reaches
    node 0.

    Raises:
        ConfigError: it is no address of this machine, or there is no way to node 0.
    """
    if (named := _named_address(environment, NODE_HOST)) is not None:
        return named
    for place in _addresses(node_0):
        if is_loopback(place):
            return LOOPBACK
        if (own := _own_address(place)) is not None:
            return own
    raise ConfigError(
        f"envgateway runs here, and others must reach it, but this machine has no address on the way to {node_0}: set "
        f"{NODE_HOST} to the name or address of this machine that they reach"
    )


def require_port(where: str, port: int) -> None:
    """Raises ``ConfigError`` for a free port in a split launch."""
    if port == 0:
        raise ConfigError(
            f"{where} is 0, a free port, which processes that are started one by one cannot know: "
            f"give it a number, with --set {where}=PORT or its variable"
        )


def _addresses(name: str) -> list[str]:
    """The addresses of a name, IPv4 first; empty if the name cannot be resolved."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(place[0]).partition("%")[0] for *_, place in ordered))


def _outward_address() -> str | None:
    return _own_address(_NOWHERE)


def _own_address(place: str) -> str | None:
    """This machine's address on the route to another one; None without a route. No packet is sent."""
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((place, _DISCARD))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if is_loopback(address) else address
