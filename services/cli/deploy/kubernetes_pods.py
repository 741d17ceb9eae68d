"""Pods of a Kubernetes deployment: containers with their commands, probes, sizes, keys and volumes."""

from __future__ import annotations

import math
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
    USER,
    WORLDS,
    Layout,
    container_variables,
    image_of,
    options,
    own_gpus,
    settings_in_containers,
)
from services.cli.deploy.sizes import size_of
from services.cli.keys.process_keys import role_of
from services.cli.plan.nodes import HOST_VARIABLE, NODE_HOST
from services.cli.plan.specs import ProcessSpec
from services.cli.run.start import WARM_START
from services.cli.run.start import WORLDS as MAKE_WORLDS
from services.common.net.hosts import host_and_port
from services.common.security.bundle import FILES
from services.common.security.roles import Role

Tree = dict[str, Any]

GPU = "nvidia.com/gpu"
GPU_KIND = "nvidia.com/gpu.product"  # the label of NVIDIA's feature discovery
_PROBE_S = 20
_HUNG_AFTER = 30  # probes without an answer, one after another: ten minutes
NESTED = {Role.TRAINER: Role.PUBLISHER, Role.INFERENCE: Role.AGENT}  # bundles that lie inside others
_COMPUTING = ("inference", "trainer")


def claim(run: str, volume: str) -> str:
    """The name of a volume claim of a run."""
    return f"{run}-{volume}"


def needs_files(layout: Layout) -> bool:
    """Whether pods read files of the user's machine: a recipe outside the images, datasets of no hub, worlds."""
    return bool(layout.own_folders() or layout.worlds() or layout.data_root() == "required")


@dataclass(frozen=True, slots=True)
class Pod:
    """The containers of one node, or of one replica."""

    layout: Layout
    run: str
    node: int
    processes: Sequence[ProcessSpec]
    gpu: str | None

    def template(self, name: str, restart: str) -> Tree:
        """The template of a Job or a Deployment; ``name`` labels its pods."""
        recipe = self.layout.recipe
        spec: Tree = {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": math.ceil(recipe.launch.stop_grace_s) + 10,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # its variables, such as NAME_PORT, would look like ours
            "securityContext": {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "runAsNonRoot": True},
        }
        if once := self._once():
            spec["initContainers"] = once
        spec["containers"] = [self._container(process) for process in self.processes]
        if self.gpu is not None and any(
            GPU in container["resources"].get("limits", {}) for container in spec["containers"]
        ):
            spec["nodeSelector"] = {GPU_KIND: self.gpu}
        spec["volumes"] = self._volumes(spec)
        labels = {"rollmill.dev/run": self.run, "rollmill.dev/process": name}
        return {"metadata": {"labels": labels}, "spec": spec}

    def claims(self) -> set[str]:
        """The volumes that outlive the pod: runs, models, files."""
        names = [WARM_START] if self._once() else []
        mounts = [mount for name in [*names, *(p.name for p in self.processes)] for mount in self._mounts(name)]
        return {mount["name"] for mount in mounts} & {"runs", "models", "files"}

    def _once(self) -> list[Tree]:
        """Containers that make worlds and starting checkpoints, before anything else of node 0 starts."""
        if self.node:
            return []
        names = [MAKE_WORLDS] if self.layout.makes_worlds() else []
        names += [WARM_START] if self.layout.recipe.warm_start else []
        return [self._basic(name) for name in names]

    def _basic(self, name: str) -> Tree:
        container: Tree = {
            "name": name.lower().replace("_", "-"),
            "image": image_of(self.layout, name).name,
            "args": self._arguments(name),
            "env": self._environment(name),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": self._seccomp(name)},
            },
        }
        if mounts := self._mounts(name):
            container["volumeMounts"] = mounts
        return container

    def _container(self, process: ProcessSpec) -> Tree:
        size = size_of(self.layout.recipe, process.name, self.node)
        requests = {"cpu": str(size.cpus)}
        if size.memory_gib is not None:
            requests["memory"] = f"{size.memory_gib}Gi"
        resources: Tree = {"requests": requests}
        if size.gpus:
            resources["limits"] = {GPU: size.gpus}
        return {**self._basic(process.name), "resources": resources, **self._probes(process)}

    def _probes(self, process: ProcessSpec) -> Tree:
        """The health service, asked with the keys of the container: Kubernetes' own gRPC probes speak no TLS.

        A process is ready once it serves; one that does not answer for ten minutes after that is started again.
        """
        if not process.address:  # a rank of a trainer on another node: the first rank answers for all
            return {}
        host, port = host_and_port(process.address)
        place = f"{host}:{port}"
        if self.layout.has_keys and not process.name.startswith("trainer-"):
            place = f"$NODE_HOST:{port}"
        command = ["sh", "-c", f"exec python -m services.common.rpc.client.health {place}"]
        probe: Tree = {"exec": {"command": command}, "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S}
        start_s = self.layout.recipe.ready_timeout_s + 3600  # a service waits for the starting checkpoints of node 0
        return {
            "startupProbe": {**probe, "failureThreshold": math.ceil(start_s / _PROBE_S)},
            "readinessProbe": probe,
            "livenessProbe": {**probe, "failureThreshold": _HUNG_AFTER},
        }

    def _seccomp(self, name: str) -> str:
        """The runtime's profile, which refuses user namespaces; the gateway's sandbox needs them (tier U)."""
        gateway = self.layout.recipe.envgateway
        needs_namespaces = name == "envgateway" and gateway is not None and not gateway.sandbox.allow_tier_0
        return "Unconfined" if needs_namespaces else "RuntimeDefault"

    def _arguments(self, name: str) -> list[str]:
        given = options(self.layout, settings_in_containers(self.layout))
        # Kubernetes puts in variables for $(NAME).
        arguments = ["start", self.layout.path, name, *(part.replace("$(", "$$(") for part in given)]
        if self._is_replica(name):
            arguments += ["--replica-id", "$(POD_NAME)"]
        return arguments

    def _environment(self, name: str) -> list[Tree]:
        layout = self.layout
        variables = container_variables(layout, name, f"{RUNS}/{layout.run_id}")
        if self.node:
            variables[HOST_VARIABLE] = self.run
        size = None if name in ONCE else size_of(layout.recipe, name, self.node)
        if size is not None and size.gpus and self._names_gpus(name):
            variables |= own_gpus(name, size.gpus)
        entries: list[Tree] = [{"name": key, "value": value} for key, value in variables.items()]
        if self._is_replica(name):
            entries.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
        if self.layout.has_keys:
            entries.append({"name": NODE_HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        return entries

    def _names_gpus(self, name: str) -> bool:
        kind, _, what = name.partition("-")
        recipe = self.layout.recipe
        if kind == "inference":
            return bool(recipe.inference[what].gpus)
        policy = what if what in recipe.policies else what.rpartition("-node")[0]
        return kind == "trainer" and bool(recipe.policies[policy].trainer.gpus)

    def _mounts(self, name: str) -> list[Tree]:
        kind, layout = name.partition("-")[0], self.layout
        mounts: list[Tree] = []
        if kind not in ("envgateway", MAKE_WORLDS):
            mounts += [{"name": "runs", "mountPath": RUNS}, {"name": "models", "mountPath": MODELS}]
        if layout.makes_worlds():
            mounts.append({"name": "worlds", "mountPath": WORLDS, "readOnly": name != MAKE_WORLDS})
        if layout.data_root() == "required":
            mounts.append({"name": "files", "mountPath": DATA, "subPath": "data", "readOnly": True})
        places = layout.own_folders()
        places += [os.fspath(path) for path in layout.worlds()] if kind == "envgateway" else []
        for place in places:
            inside = place if os.path.isabs(place) else os.path.join(APP, place)
            if os.path.isabs(place) and place.startswith(f"{CHECKOUT}/"):
                inside = os.path.join(APP, os.path.relpath(place, CHECKOUT))
            mounts.append({"name": "files", "mountPath": inside, "subPath": inside.lstrip("/"), "readOnly": True})
        if self.layout.has_keys and name not in ONCE:
            mounts.append({"name": f"keys-{role_of(name).value}", "mountPath": KEYS, "readOnly": True})
        if kind in _COMPUTING:
            mounts.append({"name": f"shm-{name.lower().replace('_', '-')}", "mountPath": "/dev/shm"})
        return mounts

    def _volumes(self, spec: Tree) -> list[Tree]:
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        names = dict.fromkeys(mount["name"] for each in containers for mount in each.get("volumeMounts", []))
        return [{"name": name, **self._volume(name)} for name in names]

    def _volume(self, name: str) -> Tree:
        if name.startswith("shm-"):
            gib = shared_memory_gib(self.layout.recipe, self.node)
            return {"emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}
        if name == "worlds":
            return {"emptyDir": {}}
        if name.startswith("keys-"):
            role = Role(name.removeprefix("keys-"))
            items = [{"key": file, "path": file} for file in FILES]
            if (nested := NESTED.get(role)) is not None:
                items += [{"key": f"{nested.value}.{file}", "path": f"{nested.value}/{file}"} for file in FILES]
            # Readable for the group of the pod alone: a secret that all users may read is refused.
            return {"secret": {"secretName": f"{self.run}-{name}", "defaultMode": 0o440, "items": items}}
        return {"persistentVolumeClaim": {"claimName": claim(self.run, name)}}

    def _is_replica(self, name: str) -> bool:
        return bool(self.node) and name.startswith("inference-")
