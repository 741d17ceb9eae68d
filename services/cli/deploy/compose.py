"""Compose files of a recipe: one for each node, one container for each process.

On one node without keys, services bind loopback only and cannot authenticate callers. So their containers share the
network namespace of one idle container, ``node``: loopback is then the pod's, and a restarted service finds the others.
Only ``forwarder`` listens outside of it, for the orchestrator's port, which is published on the host's loopback (ADR
19). On several nodes, containers use the host's network, the keys of their own role, and TLS.

With the file for GPUs, trainers and inference services also share the /dev/shm of ``node``, through which they hand
over weights, and its process ids, by which they name their files there. Without it, weights go through the publisher's
port: podman-compose cannot share either. The gateway runs untrusted programs, shares neither, and has no access to
the run directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.check.memory.host import shared_memory_gib
from services.cli.deploy.layout import (
    APP,
    CHECKOUT,
    DATA,
    KEYS,
    MODELS,
    ONCE,
    RUNS,
    WORLDS,
    Layout,
    check_images,
    container_name,
    container_variables,
    image_of,
    options,
    plain_yaml,
    settings_in_containers,
    written_by,
)
from services.cli.keys.process_keys import role_of
from services.cli.plan.nodes import HOST_VARIABLE, NODE_HOST
from services.cli.plan.specs import ProcessSpec
from services.cli.run.start import WARM_START
from services.cli.run.start import WORLDS as MAKE_WORLDS
from services.common.errors import ConfigError
from services.common.net.hosts import host_and_port
from services.common.security.bundle import VARIABLE as KEYS_VARIABLE
from services.common.system.free_ports import LOOPBACK
from services.orchestrator.tasks.catalogue import DATA_ROOT

POD = "node"
FORWARDER = "forwarder"
NO_DATA = "no-data"  # an empty volume, where no folder is named
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
PROMETHEUS_PORT = 9090

_COMPUTING = ("inference-", "trainer-")

SECCOMP = "deploy/docker/seccomp.json"
Service = dict[str, Any]


def compose_files(layout: Layout, context: str) -> dict[str, str]:
    """File name -> text: ``compose.yaml`` and ``compose.gpu.yaml``, with the prefix ``nodeN.`` for several nodes.

    ``context`` is the path from their directory to the checkout.

    Raises:
        ConfigError: a host on one node is not loopback, or another node needs files that node 0 makes, or
            an engine has no image.
    """
    several = len(layout.nodes) > 1
    if not several and not layout.recipe.is_on_loopback:
        raise ConfigError(
            "a host of the recipe is not loopback, and containers of one node share a loopback that nothing else reaches: "
            "leave the setting out; the orchestrator's port is published all the same (docs/deploy.md)"
        )
    check_images(layout)
    if several and layout.recipe.warm_start:
        raise ConfigError(
            f"{layout.path} makes starting checkpoints on node 0 (warm_start), which containers of other nodes do not see: "
            "name a checkpoint with policies.NAME.model.path, or write launch scripts with --target scripts"
        )
    files = {}
    for number in layout.nodes:
        node = _Node(layout, context, number, several=several)
        before = f"node{number}." if several else ""
        files[f"{before}compose.yaml"] = node.compose_file()
        files[f"{before}compose.gpu.yaml"] = node.gpu_file(f"{before}compose.yaml")
    return files


@dataclass(frozen=True, slots=True)
class _Node:
    """One node of a layout, and how its containers reach each other."""

    layout: Layout
    context: str
    number: int
    several: bool

    def compose_file(self) -> str:
        layout = self.layout
        services: dict[str, Service] = {POD: self._pod()}
        if not self.several:
            services[FORWARDER] = self._forwarder()
            if layout.metrics_ports:
                services["prometheus"] = self._prometheus()
        if layout.makes_worlds():
            services[MAKE_WORLDS] = self._once(MAKE_WORLDS)
        if layout.recipe.warm_start:
            services[WARM_START] = self._once(WARM_START)
        services |= {process.name: self._service(process) for process in layout.processes(self.number)}
        name = container_name(layout.recipe.name)
        name += f"-node{self.number}" if self.several else ""
        tree = {"name": name, "services": services, "volumes": self._volumes(services)}
        return self._text(f"CPU, node {self.number}." if self.several else "CPU, one machine.", tree)

    def gpu_file(self, below: str) -> str:
        """The overlay for GPUs: devices for the processes that compute on them, and shared memory for their weights.

        Each container sees all GPUs; the recipe assigns them to processes (``gpus``).
        """
        recipe = self.layout.recipe
        devices = {f"inference.{name}.device": service.device for name, service in recipe.inference.items()}
        devices |= {
            f"policies.{name}.trainer.device": policy.trainer.device for name, policy in recipe.trained_policies.items()
        }
        forced = tuple(f"{where}=cuda" for where, device in devices.items() if device == "cpu")
        gpus = {
            "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}
        }
        names = self.layout.names[self.number]
        services: dict[str, Service] = {}
        if any(name.startswith(_COMPUTING) for name in names):
            services[POD] = {"ipc": "shareable", "shm_size": f"{shared_memory_gib(recipe, self.number)}gb"}
        for name in [*([WARM_START] if recipe.warm_start else []), *names]:
            service: Service = {"command": self._command(name, forced)} if forced else {}
            if name.startswith(_COMPUTING):  # init: the pod's does for all of its processes
                service |= {"deploy": gpus, "ipc": f"service:{POD}", "pid": f"service:{POD}", "init": False}
            if service:
                services[name] = service
        return self._text(f"On top of {below}, for a machine with GPUs.", {"services": services})

    def _pod(self) -> Service:
        """Holds the namespaces that the others share."""
        service = {
            **self._image("orchestrator"),
            **_hardened(),
            "entrypoint": ["sleep", "infinity"],
            "init": True,
            "restart": "unless-stopped",
        }
        if self.several:
            return service | {"network_mode": "host"}
        orchestrator = self.layout.ports["ORCHESTRATOR_PORT"]
        ports = [f"{LOOPBACK}:${{ORCHESTRATOR_PORT:-{orchestrator}}}:{orchestrator}"]
        if self.layout.metrics_ports:
            ports.append(f"{LOOPBACK}:{PROMETHEUS_PORT}:{PROMETHEUS_PORT}")
        return service | {"ports": ports}

    def _forwarder(self) -> Service:
        """Takes connections from this machine to the orchestrator, which itself binds the pod's loopback."""
        return {
            **self._image("orchestrator"),
            **_hardened(),
            "entrypoint": ["python", "-m", "services.cli.deploy.forwarder"],
            "command": [self.layout.ports["ORCHESTRATOR_PORT"]],
            "init": True,
            "read_only": True,
            **self._network(),
            "restart": "unless-stopped",
        }

    def _prometheus(self) -> Service:
        """Asks all processes of the pod; only with ``--profile metrics``. Answers this machine alone, without a password."""
        return {
            "image": PROMETHEUS_IMAGE,
            "profiles": ["metrics"],
            **_hardened(),
            "command": ["--config.file=/etc/prometheus/prometheus.yml", f"--web.listen-address=:{PROMETHEUS_PORT}"],
            "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
            **self._network(),
            "restart": "unless-stopped",
        }

    def _once(self, name: str) -> Service:
        """Makes the starting checkpoints or the world of a profile, before anything else reads them, and ends."""
        service: Service = {
            **self._image(name),
            **_hardened(),
            "command": self._command(name),
            "environment": self._environment(name),
            "volumes": self._mounts(name),
            "network_mode": "none",
        }
        if name == WARM_START and self.layout.makes_worlds():
            service["depends_on"] = _after(MAKE_WORLDS)
        return service

    def _service(self, process: ProcessSpec) -> Service:
        kind = process.name.partition("-")[0]
        recipe = self.layout.recipe
        service: Service = {
            **self._image(process.name),
            **_hardened(),
            "command": self._command(process.name),
            "environment": self._environment(process.name),
            "init": True,
            **self._network(),
            "restart": f"on-failure:{recipe.launch.restarts}",
            "stop_grace_period": f"{recipe.launch.stop_grace_s:g}s",
        }
        if process.address:  # else its first rank answers for it
            command = ["CMD", "python", "-m", "services.common.rpc.client.health", self._answers_at(process)]
            service["healthcheck"] = {"test": command, "interval": "10s", "timeout": "20s", "start_period": "120s"}
        if volumes := self._mounts(process.name):
            service["volumes"] = volumes
        service["depends_on"] = {POD: {"condition": "service_started"}}
        if kind in ("inference", "trainer") and self.number == 0:  # itself only after the warm start
            service["depends_on"]["orchestrator"] = {"condition": "service_started"}
        if kind == "orchestrator" and recipe.warm_start:
            service["depends_on"] |= _after(WARM_START)
        if kind == "envgateway":
            if self.layout.makes_worlds():
                service["depends_on"] |= _after(MAKE_WORLDS)
            # Docker's default profile refuses the user namespaces that the sandbox makes.
            service["security_opt"].append(f"seccomp={os.path.join(self.context, SECCOMP)}")
        return service

    def _network(self) -> Service:
        if self.several:
            return {"network_mode": "host"}
        return {"network_mode": f"service:{POD}", "depends_on": {POD: {"condition": "service_started"}}}

    def _answers_at(self, process: ProcessSpec) -> str:
        host, port = host_and_port(process.address)
        if not self.several or process.name.startswith("trainer-"):
            return f"{host}:{port}"
        return f"{self._own_address(LOOPBACK)}:{port}"

    def _own_address(self, otherwise: str) -> str:
        """The address that other nodes dial on this node: on node 0 and at the gateway."""
        if self.number == 0 or "envgateway" in self.layout.names[self.number]:
            return f"${{{NODE_HOST}:?set it to the name or address of this machine that other nodes dial}}"
        return f"${{{NODE_HOST}:-{otherwise}}}"

    def _image(self, process: str) -> Service:
        image = image_of(self.layout, process)
        build = {"context": self.context, "dockerfile": image.dockerfile, "args": list(image.arguments)}
        return {"image": image.name, "build": build}

    def _mounts(self, name: str) -> list[Any]:
        kind, layout = name.partition("-")[0], self.layout
        mounts: list[Any] = []
        if kind not in ("envgateway", MAKE_WORLDS):
            mounts += [f"runs:{RUNS}", f"models:{MODELS}"]
        if layout.makes_worlds():
            mounts.append(f"worlds:{WORLDS}" + ("" if name == MAKE_WORLDS else ":ro"))
        need = layout.data_root()
        if need == "required":
            mounts.append(f"${{{DATA_ROOT}:?set it to the folder of local datasets}}:{DATA}:ro")
        elif need == "optional" and (kind != "envgateway" or layout.makes_worlds()):
            mounts.append(f"${{{DATA_ROOT}:-{NO_DATA}}}:{DATA}:ro")
        if kind == "envgateway":
            mounts += [self._world(path) for path in map(os.fspath, layout.worlds())]
        mounts += [self._world(path) for path in layout.own_folders()]
        if layout.has_keys and name not in ONCE:
            keys = f"${{{KEYS_VARIABLE}:?set it to the directory that rollmill keys made}}"
            mounts.append(f"{keys}/{role_of(name).value}:{KEYS}:ro")
        return mounts

    def _world(self, path: str) -> Service:
        """A mount of files that a process reads. In the long syntax, because the short one creates a missing
        folder."""
        place = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
        if place.startswith("../"):
            source = target = path  # elsewhere on the machine
        else:
            source, target = os.path.join(self.context, place), os.path.join(APP, place)
            source = source if source.startswith(("/", ".")) else f"./{source}"
        return {
            "type": "bind",
            "source": source,
            "target": target,
            "read_only": True,
            "bind": {"create_host_path": False},
        }

    def _volumes(self, services: dict[str, Service]) -> dict[str, Any]:
        """Those that are mounted. Models are shared by all recipes of this machine."""
        mounted = [
            mount for service in services.values() for mount in service.get("volumes", []) if isinstance(mount, str)
        ]
        known: dict[str, Any] = {"runs": {}, "models": {"name": "rollmill-models"}, "worlds": {}, NO_DATA: {}}
        return {name: known[name] for name in known if any(f"{name}:" in m or f"-{name}}}:" in m for m in mounted)}

    def _command(self, name: str, more: Sequence[str] = ()) -> list[str]:
        arguments = [_escaped(part) for part in options(self.layout, [*settings_in_containers(self.layout), *more])]
        return ["start", self.layout.path, name, *arguments]

    def _environment(self, name: str) -> dict[str, str]:
        layout = self.layout
        there = f"{RUNS}/{layout.run_id}" + (f"-node{self.number}" if self.number else "")
        variables = container_variables(layout, name, there)  # the gateway's own; no other container mounts it
        if self.several:
            variables[NODE_HOST] = self._own_address("")
        if self.number:
            variables[HOST_VARIABLE] = f"${{{HOST_VARIABLE}:?set it to the name or address of node 0}}"
        return variables

    def _text(self, what: str, tree: dict[str, Any]) -> str:
        sandbox = self.layout.recipe.envgateway and self.layout.recipe.envgateway.sandbox
        isolation = ""
        if sandbox and sandbox.allow_tier_0:
            isolation = (
                "# envgateway.sandbox.allow_tier_0 is set: where the engine allows the gateway no user namespaces, programs that\n"
                "# the policy writes run with limits, but without isolation from the gateway (docs/deploy.md).\n"
            )
        reached = (
            "Services answer inside the pod only, but for the orchestrator's port, published on this machine's loopback"
        )
        if self.several:
            reached = "Containers have the host's network; every port asks for keys of this run"
        head = (
            f"# {what} Written, not edited: {written_by(self.layout, 'compose')} -o DIR\n"
            f"# docs/deploy.md says how it is used. {reached}.\n"
        )
        return head + isolation + plain_yaml(tree)


def _after(name: str) -> Service:
    """Starts after another container has completed."""
    return {name: {"condition": "service_completed_successfully"}}


def _hardened() -> Service:
    return {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


def _escaped(text: str) -> str:
    """Escape dollar signs, which compose substitutes."""
    return text.replace("$", "$$")
