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

from services.cli.check.memory import shared_memory_gib
from services.cli.deploy.layout import (
    APP,
    CHECKOUT,
    COMPUTING,
    DATA,
    KEYS,
    MODELS,
    ONCE,
    RUNS,
    TEMPLATES,
    WORLDS,
    Layout,
    Tree,
    check_images,
    container_name,
    container_variables,
    image_of,
    options,
    part,
    plain_yaml,
    settings_in_containers,
    written_by,
)
from services.cli.keys import role_of
from services.cli.plan import HOST_VARIABLE, NODE_HOST, WARM_START, ProcessSpec
from services.cli.plan import WORLDS as MAKE_WORLDS
from services.common.errors import ConfigError
from services.common.net.hosts import host_and_port
from services.common.security.keys import VARIABLE as KEYS_VARIABLE
from services.common.system.machine import LOOPBACK
from services.orchestrator.tasks.rows import DATA_ROOT

POD = "node"
NO_DATA = "no-data"  # an empty volume, where no folder is named
PROMETHEUS_PORT = 9090
SECCOMP = "deploy/docker/seccomp.json"
TEMPLATE = TEMPLATES / "compose.yaml"
_STARTED = {"condition": "service_started"}
_COMPLETED = {"condition": "service_completed_successfully"}


def compose_files(layout: Layout, context: str) -> dict[str, str]:
    """File name -> text: ``compose.yaml`` and ``compose.gpu.yaml``, with the prefix ``nodeN.`` for several nodes; with
    metrics also ``prometheus.yml`` and the dashboard of Grafana.

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
    if layout.metrics_ports and not several:
        targets = []
        for name, port in layout.metrics_ports.items():
            labels = {"instance": name, "service": name.partition("-")[0], "run": layout.run_id}
            targets.append({"targets": [f"{LOOPBACK}:{port}"], "labels": labels})
        files["prometheus.yml"] = plain_yaml(part(TEMPLATE, "prometheus_yml", targets=targets))
        files["grafana.json"] = (CHECKOUT / "deploy" / "grafana.json").read_text(encoding="utf-8")
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
        # `node` holds the namespaces that the others share.
        pod = part(TEMPLATE, "node", **self._image("orchestrator"))
        services: dict[str, Tree] = {POD: pod}
        if self.several:
            pod["network_mode"] = "host"
        else:
            port = layout.ports["ORCHESTRATOR_PORT"]
            pod["ports"] = [f"{LOOPBACK}:${{ORCHESTRATOR_PORT:-{port}}}:{port}"]
            services["forwarder"] = part(TEMPLATE, "forwarder", **self._image("orchestrator"), port=[port])
            if layout.metrics_ports:
                pod["ports"].append(f"{LOOPBACK}:{PROMETHEUS_PORT}:{PROMETHEUS_PORT}")
                services["prometheus"] = part(TEMPLATE, "prometheus")
        if layout.makes_worlds():
            services[MAKE_WORLDS] = self._container("once", MAKE_WORLDS, volumes=self._mounts(MAKE_WORLDS))
        if layout.recipe.warm_start:
            services[WARM_START] = self._container("once", WARM_START, volumes=self._mounts(WARM_START))
            if layout.makes_worlds():
                services[WARM_START]["depends_on"] = {MAKE_WORLDS: _COMPLETED}
        services |= {process.name: self._service(process) for process in layout.processes(self.number)}
        name = container_name(layout.recipe.name)
        name += f"-node{self.number}" if self.several else ""
        mounts = [m for service in services.values() for m in service.get("volumes", []) if isinstance(m, str)]
        # Those that are mounted. Models are shared by all recipes of this machine.
        known: Tree = {"runs": {}, "models": {"name": "rollmill-models"}, "worlds": {}, NO_DATA: {}}
        volumes = {name: known[name] for name in known if any(f"{name}:" in m or f"-{name}}}:" in m for m in mounts)}
        tree = {"name": name, "services": services, "volumes": volumes}
        return self._text(f"CPU, node {self.number}." if self.several else "CPU, one machine.", tree)

    def gpu_file(self, below: str) -> str:
        """The overlay for GPUs: devices for the processes that compute on them, and shared memory for their weights."""
        recipe = self.layout.recipe
        devices = {f"inference.{name}.device": service.device for name, service in recipe.inference.items()}
        devices |= {
            f"policies.{name}.trainer.device": policy.trainer.device for name, policy in recipe.trained_policies.items()
        }
        forced = tuple(f"{where}=cuda" for where, device in devices.items() if device == "cpu")
        names = self.layout.names[self.number]
        computing = [name for name in names if name.partition("-")[0] in COMPUTING]
        services: dict[str, Tree] = {}
        if computing:
            services[POD] = {"ipc": "shareable", "shm_size": f"{shared_memory_gib(recipe, self.number)}gb"}
        for name in [*([WARM_START] if recipe.warm_start else []), *names]:
            service: Tree = {"command": self._command(name, forced)} if forced else {}
            if name in computing:
                service |= part(TEMPLATE, "gpus")
            if service:
                services[name] = service
        return self._text(f"On top of {below}, for a machine with GPUs.", {"services": services})

    def _service(self, process: ProcessSpec) -> Tree:
        kind = process.name.partition("-")[0]
        recipe = self.layout.recipe
        service = self._container("process", process.name)
        service["network_mode"] = "host" if self.several else f"service:{POD}"
        after: Tree = {POD: _STARTED}
        service["depends_on"] = after
        service["restart"] = f"on-failure:{recipe.launch.restarts}"
        service["stop_grace_period"] = f"{recipe.launch.stop_grace_s:g}s"
        if process.address:  # else its first rank answers for it
            host, port = host_and_port(process.address)
            if self.several and kind != "trainer":
                host = self._own_address(LOOPBACK)
            command = ["CMD", "python", "-m", "services.common.rpc.client", f"{host}:{port}"]
            service["healthcheck"] = {"test": command, "interval": "10s", "timeout": "20s", "start_period": "120s"}
        if volumes := self._mounts(process.name):
            service["volumes"] = volumes
        if self.several:
            service["depends_on"] = service.pop("depends_on")  # at the end
        if kind in COMPUTING and self.number == 0:  # itself only after the warm start
            after["orchestrator"] = _STARTED
        if kind == "orchestrator" and recipe.warm_start:
            after[WARM_START] = _COMPLETED
        if kind == "envgateway":
            if self.layout.makes_worlds():
                after[MAKE_WORLDS] = _COMPLETED
            # Docker's default profile refuses the user namespaces that the sandbox makes.
            service["security_opt"].append(f"seccomp={os.path.join(self.context, SECCOMP)}")
        return service

    def _container(self, template: str, name: str, **values: object) -> Tree:
        layout = self.layout
        there = f"{RUNS}/{layout.run_id}" + (f"-node{self.number}" if self.number else "")
        variables = container_variables(layout, name, there)  # the gateway's own; no other container mounts it
        if self.several:
            variables[NODE_HOST] = self._own_address("")
        if self.number:
            variables[HOST_VARIABLE] = f"${{{HOST_VARIABLE}:?set it to the name or address of node 0}}"
        own = {"command": self._command(name), "environment": variables}
        return part(TEMPLATE, template, **self._image(name), **own, **values)

    def _image(self, process: str) -> Tree:
        image, dockerfile, arguments = image_of(self.layout, process)
        return {"image": image, "build": {"context": self.context, "dockerfile": dockerfile, "args": arguments}}

    def _own_address(self, otherwise: str) -> str:
        """The address that other nodes dial on this node: on node 0 and at the gateway."""
        if self.number == 0 or "envgateway" in self.layout.names[self.number]:
            return f"${{{NODE_HOST}:?set it to the name or address of this machine that other nodes dial}}"
        return f"${{{NODE_HOST}:-{otherwise}}}"

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
        for path in [*(layout.worlds() if kind == "envgateway" else []), *layout.own_folders()]:
            place = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
            source = target = path  # elsewhere on the machine
            if not place.startswith("../"):
                source, target = os.path.join(self.context, place), os.path.join(APP, place)
                source = source if source.startswith(("/", ".")) else f"./{source}"
            # In the long syntax, because the short one creates a missing folder.
            bind = {"type": "bind", "source": source, "target": target, "read_only": True}
            mounts.append({**bind, "bind": {"create_host_path": False}})
        if layout.has_keys and name not in ONCE:
            keys = f"${{{KEYS_VARIABLE}:?set it to the directory that rollmill keys made}}"
            mounts.append(f"{keys}/{role_of(name).value}:{KEYS}:ro")
        return mounts

    def _command(self, name: str, more: Sequence[str] = ()) -> list[str]:
        given = options(self.layout, [*settings_in_containers(self.layout), *more])
        return ["start", self.layout.path, name, *(each.replace("$", "$$") for each in given)]  # compose substitutes it

    def _text(self, what: str, tree: Tree) -> str:
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
