"""Runs over several nodes: the address of node 0 on each, and the commands for the others. Starts no process.

    node 0   binds its own address, not loopback, wherever another node dials in: orchestrator, gateway, publishers, replicas
    node N   gets a bundle from node 0 (the resolved recipe and its keys) and dials node 0 over TLS

No process dials into node N unless the environment gateway is there (``envgateway.node``). The gateway listens at the
address with which node 0 is reached, and reports this address to the orchestrator. With ``NODE_HOST`` all processes of
a node listen at that address, so that others fetch weights there.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.cli.plan.specs import plan
from services.common.config.reading.loading import set_at
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import IN_CHECKOUT
from services.common.net.hosts import is_here, is_loopback
from services.common.system.free_ports import LOOPBACK

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
    sections = [tree["orchestrator"], *(service for service in tree["inference"].values() if service["node"] == 0)]
    sections += [tree["envgateway"]] if recipe.envgateway and recipe.envgateway.node == 0 else []
    sections += [policy["weights"] for policy in tree["policies"].values()]
    for section in sections:
        if is_loopback(section["host"]):
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
    variable = next((name for name in (NODE_HOST, HOST_VARIABLE) if environment.get(name)), None)
    name = environment[variable] if variable else socket.gethostname()
    found = [address for address in _addresses(name) if not is_loopback(address)]
    own = next((address for address in found if is_here(address)), None)
    if own is not None:
        return own
    if variable is not None:
        what = (
            f"which is {', '.join(found)}" if found else "which is no name that leads to another address than loopback"
        )
        raise ConfigError(
            f"{variable} is {name}, {what}: it must be a name or address of this machine that the other nodes reach "
            "(`ip -brief address` lists them)"
        )
    if (outward := _outward_address()) is not None:
        return outward
    raise ConfigError(
        f"this recipe has processes on other nodes, but {name} leads to no address that they could dial: set {NODE_HOST} to "
        "the name or address of this machine that they reach"
    )


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
    name = environment.get(NODE_HOST, "")
    if not name:
        return LOOPBACK
    own = next((address for address in _addresses(name) if is_here(address)), None)
    if own is None:
        raise ConfigError(
            f"{NODE_HOST} is {name}, which is no name or address of this machine: write one, or leave {NODE_HOST} out: "
            "then no other machine fetches weights from here"
        )
    return own


def gateway_host(node_0: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address at which the gateway of another node listens: NODE_HOST, else the one with which this machine reaches
    node 0.

    Raises:
        ConfigError: it is no address of this machine, or there is no way to node 0.
    """
    if environment.get(NODE_HOST):
        return listening_host(environment)
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
