"""Runs over several nodes: the command that another node needs, and the way from there to node 0.

Services bind loopback only, because they do not authenticate their callers. So another node reaches node 0 through ssh,
which does: it forwards the ports of the orchestrator, the environment gateway and the weight publishers, under the same
numbers. Nobody dials into the other node. Starts nothing.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.cli.plan import ProcessSpec
from services.common.config.loading import load_recipe, port_variables
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.loopback import is_loopback

HOST_VARIABLE = "ORCHESTRATOR_HOST_EXTERNAL"
SCRIPTS = {"inference-a": "deploy/launch/1_inference_a.sh", "inference-b": "deploy/launch/1_inference_b.sh"}


def commands_for_other_nodes(
    recipe: Recipe, path: Path, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """One line to paste for every inference service on a node other than 0, the host name of this node filled in.

    ``path`` and ``overrides`` are those that the resolved ``recipe`` was loaded from.
    """
    others = [(service.node, name) for name, service in recipe.inference.items() if service.node != 0]
    if not others:
        return []
    host = environment.get(HOST_VARIABLE) or socket.gethostname()
    variables = " ".join([f"{HOST_VARIABLE}={shlex.quote(host)}", *_ports_that_differ(recipe, path, overrides)])
    settings = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    lines = []
    for node, name in sorted(others):
        process = f"inference-{name}"
        script = SCRIPTS.get(process)
        target = shlex.quote(str(path))
        command = f"{script} {target}" if script else f"python -m services.cli start {target} {process}"
        lines += [f"paste on node {node}, in the same checkout:", f"  {variables} {command}{settings}"]
    return lines


def _ports_that_differ(recipe: Recipe, path: Path, overrides: Sequence[str]) -> list[str]:
    """NAME=PORT for every port that the other node would not find by itself."""
    plain = load_recipe(path, overrides, {}).model_dump(mode="json")
    resolved = recipe.model_dump(mode="json")
    found = []
    for name, keys in port_variables(resolved).items():
        here, there = resolved, plain
        for key in keys:
            here, there = here[key], there[key]
        if here is not None and here != there:
            found.append(f"{name}={here}")
    return found


def host_of_node_0(recipe: Recipe, process: str, node: int, environment: Mapping[str, str] = os.environ) -> str:
    """Where a process of a node finds node 0; the recipe's own host on node 0.

    Raises:
        ConfigError: the process is on another node, and nobody says where node 0 is.
    """
    host = environment.get(HOST_VARIABLE, "")
    if host:
        return host
    if node == 0:
        return recipe.orchestrator.host
    raise ConfigError(
        f"{process} runs on node {node} and must know where node 0 is: set {HOST_VARIABLE} to the host name of the node "
        f"that runs the orchestrator, as this node's ssh reaches it ({HOST_VARIABLE}=node0 ...; `millrace run` on node 0 "
        "prints the whole command)"
    )


def needs_tunnel(host: str) -> bool:
    """Whether the way to a host leaves this machine."""
    return not is_loopback(host) and host not in (socket.gethostname(), socket.getfqdn())


def tunnel(recipe: Recipe, host: str) -> ProcessSpec:
    """ssh that forwards what an inference service dials on node 0; healthy when the orchestrator answers through it.

    Raises:
        ConfigError: a port is 0, so that nobody elsewhere can know it.
    """
    ports = {"orchestrator.port": recipe.orchestrator.port}
    if recipe.envgateway is not None:
        ports["envgateway.port"] = recipe.envgateway.port
    ports |= {f"policies.{name}.weights.port": policy.weights.port for name, policy in recipe.policies.items()}
    arguments: list[str] = []
    for where, port in ports.items():
        require_port(where, port)
        arguments += ["-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    options = [
        part
        for option in ("ExitOnForwardFailure=yes", "BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4")
        for part in ("-o", option)
    ]
    address = f"127.0.0.1:{recipe.orchestrator.port}"
    return ProcessSpec(name="tunnel", argv=("ssh", "-N", *options, *arguments, host), address=address)


def require_port(where: str, port: int) -> None:
    """Raises ``ConfigError`` for a free port in a split launch."""
    if port == 0:
        raise ConfigError(
            f"{where} is 0, a free port, which processes that are started one by one cannot know: "
            f"give it a number, with --set {where}=PORT or its variable"
        )
