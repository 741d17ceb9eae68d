"""Deployments on clusters: a Slurm job, Kubernetes manifests and SkyPilot tasks of a recipe.

    slurm        ``job.sbatch`` with the launch scripts that its tasks run; the run lies on a file system that all nodes see,
                 and a job that is requeued (a node that fails, a preemption, its time limit) goes on with its run
    kubernetes   a Job for each node, and a Deployment for each inference service, for ``kubectl apply -k``. Inference
                 services get nodes of their own, so that each can be scaled; the run then has keys, as Secrets. A pod that is
                 lost comes again elsewhere, and the run goes on from its directory, on a volume that all pods see
    skypilot     ``task.yaml``: each machine gets the checkout, installs the packages, writes the launch scripts there and
                 runs those of its node. The keys of the run are made before, and reach the machines as SkyPilot's secrets

Each adds, for every inference service of a run with keys, what adds replicas while the run goes on.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extras.deploy.files import (
    CHECKOUT,
    COMPUTING,
    DATA,
    KEYS,
    MODELS,
    ONCE,
    RUNS,
    USER,
    WORLDS,
    Layout,
    Tree,
    check_images,
    container_name,
    container_variables,
    image_of,
    launch_scripts,
    lay_out,
    options,
    other_variables,
    render,
    render_yaml,
    settings_in_containers,
    written_by,
)
from services.cli.check.memory import GIB, HostEstimate, ModelShape, host_estimates, shared_memory_gib
from services.cli.keys import role_of
from services.cli.plan import HOST_VARIABLE, NODE_HOST, ProcessSpec
from services.cli.plan import WORLDS as MAKE_WORLDS
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import COMPLETE, IN_CHECKOUT
from services.common.net.hosts import host_and_port
from services.common.security.keys import FILES, Role
from services.orchestrator.tasks.rows import DATA_ROOT

_PROCESS_GIB = 2  # an interpreter with its libraries
_SPARE = 1.2


# --- sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one process, or one node, needs. ``memory_gib`` is the estimate of ``services.cli.check.memory`` with a fifth to
    spare, and None where the size of a model is not known before the run."""

    gpus: int = 0
    cpus: int = 1
    memory_gib: int | None = _PROCESS_GIB


def own_gpus(process: str, number: int) -> dict[str, str]:
    """The variable that names the GPUs of a process which has its own alone, numbered from 0, as in a container."""
    variable = process.partition("-node")[0].upper().replace("-", "_")
    return {f"{variable}_GPUS": ",".join(map(str, range(number)))}


def named_gpus(recipe: Recipe, process: str) -> list[int]:
    """The GPUs that the recipe names for a process."""
    kind, _, name = process.partition("-")
    if kind == "inference":
        return list(recipe.inference[name].gpus)
    return list(recipe.policies[_policy_of(recipe, name)].trainer.gpus) if kind == "trainer" else []


def size_of(recipe: Recipe, process: str, node: int) -> Size:
    """The size of a process of the plan on its node. A container has its own GPUs alone, numbered from 0."""
    kind, _, name = process.partition("-")
    gpus = len(named_gpus(recipe, process))
    if kind == "inference":
        service = recipe.inference[name]
        computes = service.device != "cpu" and service.engine not in ("scripted", "forced")
        parallel = service.servers.tensor_parallel if service.servers is not None else 1
        memory = _memory_gib(recipe, service.policies or list(recipe.policies), process, node)
        return Size(gpus=gpus or (parallel if computes else 0), cpus=1 + service.threads, memory_gib=memory)
    if kind == "trainer":
        policy = _policy_of(recipe, name)
        trainer = recipe.policies[policy].trainer
        ranks = trainer.num_ranks // len(trainer.nodes)
        memory = _memory_gib(recipe, [policy], process, node)
        gpus = gpus or (ranks if trainer.device != "cpu" else 0)
        return Size(gpus=gpus, cpus=1 + ranks * trainer.threads, memory_gib=memory)
    if kind == "envgateway" and recipe.envgateway is not None:
        sandbox = recipe.envgateway.sandbox
        programs = math.ceil(sandbox.num_slots * sandbox.memory_bytes / GIB)
        return Size(cpus=1 + sandbox.num_slots, memory_gib=_PROCESS_GIB + programs)
    return Size()


def size_of_node(recipe: Recipe, node: int, processes: Iterable[str]) -> Size:
    """The size of a whole node, on which processes take GPUs by their numbers."""
    sizes = {name: size_of(recipe, name, node) for name in processes}
    known_gib = [size.memory_gib for size in sizes.values() if size.memory_gib is not None]
    gpus = [size.gpus for size in sizes.values()] + [gpu + 1 for name in sizes for gpu in named_gpus(recipe, name)]
    return Size(
        gpus=max(gpus, default=0),
        cpus=sum(size.cpus for size in sizes.values()),
        memory_gib=sum(known_gib) if len(known_gib) == len(sizes) else None,
    )


def largest(layout: Layout) -> Size:
    """The size that every node of a job has when the scheduler gives all of them the same."""
    found = [size_of_node(layout.recipe, node, names) for node, names in layout.names.items()]
    memory = [size.memory_gib for size in found if size.memory_gib is not None]
    return Size(
        gpus=max(size.gpus for size in found),
        cpus=max(size.cpus for size in found),
        memory_gib=max(memory) if len(memory) == len(found) else None,
    )


def _policy_of(recipe: Recipe, name: str) -> str:
    """The policy in ``POLICY`` or ``POLICY-nodeN``."""
    return name if name in recipe.policies else name.rpartition("-node")[0]


def _memory_gib(recipe: Recipe, policies: list[str], process: str, node: int) -> int | None:
    """The memory of a process that has these policies."""
    if any(ModelShape.of(recipe.policies[name].model.path) is None for name in policies):
        return None
    of_process = host_estimates(recipe, has_gpus=True).get(node, HostEstimate()).of_process
    return _PROCESS_GIB + math.ceil(_SPARE * of_process[process] / GIB)


def _replicas(layout: Layout) -> Iterator[dict[str, Any]]:
    """What templates of more replicas take, of each inference service of a run over several nodes: another run has neither keys
    nor an address that another node reaches. ``ports`` has the GPUs, too: a scheduler shows a replica its own, numbered from 0."""
    for name, service in layout.recipe.inference.items() if len(layout.nodes) > 1 else ():
        process = f"inference-{name}"
        size = size_of(layout.recipe, process, service.node)
        ports = {**layout.ports, **(own_gpus(process, size.gpus) if service.gpus else {})}
        arguments = shlex.join([layout.path, process, *options(layout)])
        yield {"name": name, "process": process, "size": size, "ports": ports, "arguments": arguments}


# --- Slurm


def slurm_files(layout: Layout, output: Path) -> dict[str, str]:
    """File name -> text. ``output``: their directory, which the nodes see at the same path or in their checkout."""
    place = output.relative_to(CHECKOUT).as_posix() if output.is_relative_to(CHECKOUT) else str(output)
    name = container_name(layout.recipe.name)
    common = {"layout": layout, "place": shlex.quote(place), "written_by": written_by(layout, "slurm")}
    files = launch_scripts(layout, output)
    variables = other_variables(layout, "all nodes")
    files["job.sbatch"] = render("job.sbatch", job=name, size=largest(layout), variables=variables, **common)
    files["task.sh"] = render("task.sh", **common)
    for replica in _replicas(layout):
        variable = f"{replica['process'].upper().replace('-', '_')}_PORT"
        replica["ports"][variable] = "0"  # two replicas of one machine must not want the same port
        files[f"replica-{replica['name']}.sbatch"] = render(
            "replica.sbatch", job=f"{name}-{replica['name']}", **replica, **common
        )
    return files


# --- Kubernetes

_MAX_NAME = 40  # of 63: kinds, processes and Kubernetes' own endings follow
_NESTED = {Role.TRAINER: Role.PUBLISHER, Role.INFERENCE: Role.AGENT}  # bundles that lie inside others
_VOLUMES = ("runs", "models", "files")  # that outlive pods


def kubernetes_files(asked: Layout, _output: Path) -> dict[str, str]:
    """File name -> text of the manifests.

    Raises:
        ConfigError: the recipe has no TLS, names a host, which no pod has before it runs, or an engine without an image.
    """
    if asked.recipe.security.tls == "off":
        raise ConfigError("pods reach each other over a network: leave out security.tls: off, so that the run has keys")
    if not asked.recipe.is_on_loopback:
        raise ConfigError(
            "a host of the recipe is not loopback, and a pod gets its address when it starts: leave the hosts out"
        )
    check_images(asked)
    # Every inference service on a node of its own, behind those of all other processes.
    services = [f"inference-{name}" for name in asked.recipe.inference]
    first = max((node for node, names in asked.names.items() if not set(names) <= set(services)), default=0) + 1
    spread = [f"inference.{name}.node={first + place}" for place, name in enumerate(asked.recipe.inference)]
    layout = lay_out(asked.source, [*asked.overrides, *spread], asked.profile, asked.gpu)
    run = _dns_name(layout.run_id)
    jobs: list[_Pod] = []
    replicas: list[_Pod] = []
    for node in layout.nodes:
        processes = layout.processes(node)
        spread_out = [process for process in processes if node and process.name.startswith("inference-")]
        if others := [process for process in processes if process not in spread_out]:
            jobs.append(_Pod(layout, run, f"{run}-node{node}", node, others))
        replicas += [_Pod(layout, run, f"{run}-{_dns_name(each.name)}", node, [each]) for each in spread_out]
    used = {volume for pod in (*jobs, *replicas) for volume in pod.volumes}
    has_files = layout.own_folders() or layout.worlds() or layout.data_root() == "required"  # of the user's machine
    names = ["replicas.yaml", "run.yaml", *(["volumes.yaml"] if used & {*_VOLUMES} else [])]
    values: dict[str, Any] = {
        "layout": layout,
        "run": run,
        "jobs": jobs,
        "replicas": replicas,
        "claims": [volume for volume in _VOLUMES if volume in used],
        "resources": names,
        "images": sorted({image_of(layout, process)[0] for names in layout.names.values() for process in names}),
        "image_of": image_of,
        "key_files": _key_files,
        "user": USER,
        "written_by": written_by(asked, "kubernetes"),
    }
    names = [*names, "kustomization.yaml", *(["files.yaml"] if has_files else [])]
    return {name: render_yaml(f"kubernetes/{name}", **values) for name in names}


def _key_files(role: str) -> dict[str, str]:
    """The files of `rollmill keys` for a role, with those of the bundle inside: key in a Secret -> path."""
    files = {file: file for file in FILES}
    if (nested := _NESTED.get(Role(role))) is not None:
        files |= {f"{nested.value}.{file}": f"{nested.value}/{file}" for file in FILES}
    return files


def _dns_name(name: str) -> str:
    """A name as Kubernetes takes it: lower case, digits and dashes, and bounded; two long names stay two.

    >>> _dns_name("My_run.7")
    'my-run-7'
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    if len(plain) > _MAX_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        plain = f"{plain[: _MAX_NAME - 9].rstrip('-')}-{digest}"
    return plain


@dataclass(frozen=True, slots=True)
class _Pod:
    """The containers of one node, or of one replica."""

    layout: Layout
    run: str
    name: str
    node: int
    processes: Sequence[ProcessSpec]

    @property
    def makers(self) -> list[str]:
        """Containers that end before the others of node 0 start."""
        return [] if self.node else self.layout.makers

    @property
    def volumes(self) -> list[str]:
        names = [*self.makers, *(process.name for process in self.processes)]
        return list(dict.fromkeys(mount["name"] for name in names for mount in self.mounts(name)))

    @property
    def takes_gpus(self) -> bool:
        return any(self.size(process.name).gpus for process in self.processes)

    def size(self, name: str) -> Size:
        return size_of(self.layout.recipe, name, self.node)

    def is_replica(self, name: str) -> bool:
        return self.node > 0 and name.startswith("inference-")

    def arguments(self, name: str) -> list[str]:
        given = options(self.layout, settings_in_containers(self.layout))
        own = ["--replica-id", "$(POD_NAME)"] if self.is_replica(name) else []
        # Kubernetes puts in variables for $(NAME).
        return ["start", self.layout.path, name, *(each.replace("$(", "$$(") for each in given), *own]

    def variables(self, name: str) -> dict[str, str]:
        layout = self.layout
        variables = container_variables(layout, name, f"{RUNS}/{layout.run_id}")
        if self.node:
            variables[HOST_VARIABLE] = self.run
        if name not in ONCE and named_gpus(layout.recipe, name):
            variables |= own_gpus(name, self.size(name).gpus)
        return variables

    def health_address(self, process: ProcessSpec) -> str:
        host, port = host_and_port(process.address)
        by_keys = self.layout.has_keys and not process.name.startswith("trainer-")
        return f"${NODE_HOST}:{port}" if by_keys else f"{host}:{port}"

    def mounts(self, name: str) -> list[Tree]:
        kind, layout = name.partition("-")[0], self.layout
        mounts: list[Tree] = []
        if kind not in ("envgateway", MAKE_WORLDS):
            mounts += [{"name": "runs", "mountPath": RUNS}, {"name": "models", "mountPath": MODELS}]
        if layout.makes_worlds():
            mounts.append({"name": "worlds", "mountPath": WORLDS, "readOnly": name != MAKE_WORLDS})
        if layout.data_root() == "required":
            mounts.append({"name": "files", "mountPath": DATA, "subPath": "data", "readOnly": True})
        for inside in layout.folders_of(kind).values():
            mounts.append({"name": "files", "mountPath": inside, "subPath": inside.lstrip("/"), "readOnly": True})
        if layout.has_keys and name not in ONCE:
            mounts.append({"name": f"keys-{role_of(name).value}", "mountPath": KEYS, "readOnly": True})
        if kind in COMPUTING:
            mounts.append({"name": f"shm-{name.lower().replace('_', '-')}", "mountPath": "/dev/shm"})
        return mounts

    def volume(self, name: str) -> Tree:
        if name.startswith("shm-"):
            gib = shared_memory_gib(self.layout.recipe, self.node)
            return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}
        if name == "worlds":
            return {"name": name, "emptyDir": {}}
        if name.startswith("keys-"):
            items = [{"key": key, "path": path} for key, path in _key_files(name.removeprefix("keys-")).items()]
            # Readable for the group of the pod alone: a secret that all users may read is refused.
            return {"name": name, "secret": {"secretName": f"{self.run}-{name}", "defaultMode": 0o440, "items": items}}
        return {"name": name, "persistentVolumeClaim": {"claimName": f"{self.run}-{name}"}}


# --- SkyPilot

_WORKDIR = "~/sky_workdir"  # where SkyPilot puts the checkout
_SECRET = "ROLLMILL_KEYS_{}"  # with the keys of a role


def skypilot_files(layout: Layout, _output: Path) -> dict[str, str]:
    """File name -> text.

    Raises:
        ConfigError: outside of a checkout, the recipe takes GPUs and no kind is named, or other nodes need files that
            node 0 makes.
    """
    if not IN_CHECKOUT:
        raise ConfigError("skypilot takes files of a checkout: run `rollmill deploy` of one, or write --target scripts")
    recipe, several = layout.recipe, len(layout.nodes) > 1
    if several and recipe.warm_start:
        raise ConfigError(
            f"{layout.path} makes starting checkpoints on node 0 (warm_start), which machines of SkyPilot do not share: name a "
            "checkpoint with policies.NAME.model.path"
        )
    roles = {role for named in layout.roles for role in named} if layout.has_keys else set()
    secrets = sorted(_SECRET.format(role.upper()) for role in roles)
    arguments = shlex.join([layout.path, "--target", "scripts", *options(layout)])
    quoted, name = shlex.quote(layout.run_id), container_name(recipe.name)
    tasks: list[dict[str, Any]] = [
        {
            "file": "task.yaml",
            "what": f"All of {layout.path}",
            "launch": "sky jobs launch",
            "name": name,
            "size": largest(layout),
            "processes": [name for named in layout.names.values() for name in named],
            "secrets": secrets,
            "envs": {},
            "num_nodes": len(layout.nodes),
            "run": render("run.sky.sh", layout=layout, secrets=secrets, run=quoted, arguments=arguments),
        }
    ]
    tasks += [
        {
            "file": f"replica-{more['name']}.yaml",
            "what": f"More replicas of {more['process']} for a run of {layout.path} that goes on",
            "launch": f"sky launch --num-nodes 4 --env {HOST_VARIABLE}=...",
            "name": f"{name}-{more['name']}",
            "size": more["size"],
            "processes": [more["process"]],
            "secrets": [_SECRET.format("INFERENCE")],
            "envs": {HOST_VARIABLE: None},
            "num_nodes": None,  # each is one more replica, which dials the orchestrator
            "run": render("replica.sky.sh", run=quoted, **more),
        }
        for more in _replicas(layout)
    ]
    return {task["file"]: _task(layout, **task) for task in tasks}


def _task(
    layout: Layout, *, name: str, size: Size, processes: list[str], envs: dict[str, str | None], **values: Any
) -> str:
    if size.gpus and layout.gpu is None:
        raise ConfigError(
            f"{name} takes {size.gpus} GPUs on a machine, and SkyPilot asks which: write --gpu H100, or another"
        )
    if layout.data_root() != "none":
        envs = {**envs, DATA_ROOT: None if layout.data_root() == "required" else ""}
    # Folders of this machine at the paths at which the recipe names them; git may ignore those in the checkout.
    mounts = {place: place for place in layout.own_folders()}
    for path in layout.worlds():
        inside = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
        mounts |= {path: path} if inside.startswith("../") else {f"{_WORKDIR}/{inside}": inside}
    extras = sorted({process.partition("-")[0] for process in processes})
    if "envgateway" in extras and (environment := layout.environment()):
        extras.append(environment)
    services = [process.partition("-")[2] for process in processes if process.startswith("inference-")]
    engines = {layout.recipe.inference[service].engine for service in services}
    return render_yaml(
        "task.sky.yaml",
        layout=layout,
        name=name,
        size=size,
        envs=envs,
        mounts=mounts,
        setup=render("setup.sky.sh", extras=extras, engines=engines, complete=COMPLETE),
        path=shlex.quote(layout.path),
        written_by=written_by(layout, "skypilot"),
        **values,
    )
