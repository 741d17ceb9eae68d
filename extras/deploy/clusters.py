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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from extras.deploy.files import (
    APP,
    CHECKOUT,
    COMPUTING,
    DATA,
    KEYS,
    MODELS,
    ONCE,
    RUNS,
    TEMPLATES,
    USER,
    WORLDS,
    Layout,
    Tree,
    check_images,
    container_name,
    container_variables,
    fill,
    image_of,
    launch_scripts,
    lay_out,
    options,
    other_variables,
    part,
    plain_yaml,
    settings_in_containers,
    written_by,
)
from services.cli.check.memory import GIB, HostEstimate, ModelShape, host_estimates, shared_memory_gib
from services.cli.keys import role_of
from services.cli.plan import HOST_VARIABLE, NODE_HOST, WARM_START, ProcessSpec
from services.cli.plan import WORLDS as MAKE_WORLDS
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import COMPLETE, IN_CHECKOUT
from services.common.net.hosts import host_and_port
from services.common.security.keys import FILES, Role
from services.orchestrator.tasks.rows import DATA_ROOT

_MANIFESTS = TEMPLATES / "kubernetes.yaml"
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


# --- what several targets say


def _shell_lists(layout: Layout) -> dict[str, str]:
    """The nodes, and the roles of each, as arrays of a script that runs on every node."""
    return {
        "nodes": " ".join(map(str, layout.nodes)),
        "roles": " ".join(f'"{" ".join(named)}"' for named in layout.roles),
        "node_0_host": f'export {NODE_HOST}="$NODE_0"\n  ' if len(layout.nodes) > 1 else "",
    }


def _replica_variables(layout: Layout, name: str, size: Size) -> dict[str, str]:
    """Ports and GPUs of one more replica: a scheduler shows it its own GPUs, numbered from 0."""
    process = f"inference-{name}"
    return {**layout.ports, **(own_gpus(process, size.gpus) if layout.recipe.inference[name].gpus else {})}


# --- Slurm


def slurm_files(layout: Layout, output: Path) -> dict[str, str]:
    """File name -> text. ``output``: their directory, which the nodes see at the same path or in their checkout."""
    place = output.relative_to(CHECKOUT).as_posix() if output.is_relative_to(CHECKOUT) else str(output)
    files = launch_scripts(layout, output)
    several = len(layout.nodes) > 1
    common = {"place": shlex.quote(place), "written_by": written_by(layout, "slurm")}
    files["job.sbatch"] = fill(
        TEMPLATES / "job.sbatch",
        what=f"All of {layout.path} in one job: {len(layout.nodes)} node{'s' if several else ''}, a task on each.",
        options=_sbatch(
            layout,
            largest(layout),
            # the signal before the time limit, in which the job is requeued
            (f"--nodes={len(layout.nodes)}", "--ntasks-per-node=1", "--signal=B:USR1@180"),
        ),
        run=layout.run_id,
        restarts=layout.recipe.launch.restarts,
        variables=other_variables(layout, "all nodes"),
        **common,
    )
    what = f"The processes of one node of {layout.path}, as a task of job.sbatch."
    files["task.sh"] = fill(TEMPLATES / "task.sh", what=what, **_shell_lists(layout), **common)
    for name, service in layout.recipe.inference.items() if several else ():
        # Else the run has neither keys nor an address that another node reaches.
        process = f"inference-{name}"
        size = size_of(layout.recipe, process, service.node)
        variables = _replica_variables(layout, name, size)
        # Two replicas of one machine must not want the same port.
        variables[f"{process.upper().replace('-', '_')}_PORT"] = "0"
        files[f"replica-{name}.sbatch"] = fill(
            TEMPLATES / "replica.sbatch",
            what=f"More replicas of {process} for a run of {layout.path} that goes on.",
            options=_sbatch(layout, size, ("--nodes=1", "--ntasks=1"), f"-{name}"),
            file=f"replica-{name}.sbatch",
            arguments=shlex.join([layout.path, process, *options(layout)]),
            ports=" ".join(f"{key}={value}" for key, value in variables.items()),
            name=name,
            **common,
        )
    return files


def _sbatch(layout: Layout, size: Size, own: tuple[str, ...], more: str = "") -> str:
    """The lines of sbatch. ``--mem=0`` is all memory of a node, where the need is not known before the run."""
    kind = "" if layout.gpu is None else f"{layout.gpu}:"
    lines = [
        f"--job-name={container_name(layout.recipe.name)}{more}",
        *own,
        f"--cpus-per-task={size.cpus}",
        f"--mem={f'{size.memory_gib}G' if size.memory_gib is not None else 0}",
        *([f"--gpus-per-node={kind}{size.gpus}"] if size.gpus else []),
        *("--requeue", "--open-mode=append", "--output=%x-%j.out"),
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines)


# --- Kubernetes

GPU = "nvidia.com/gpu"
_MAX_NAME = 40  # of 63: kinds, processes and Kubernetes' own endings follow
_NESTED = {Role.TRAINER: Role.PUBLISHER, Role.INFERENCE: Role.AGENT}  # bundles that lie inside others
_VOLUMES = ("runs", "models", "files")  # that outlive pods
_PROBE_S = 20
_HUNG_AFTER = 30  # probes without an answer, one after another: ten minutes


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
    documents: dict[str, list[Tree]] = {"run.yaml": [], "replicas.yaml": []}
    used: set[str] = set()
    for node in layout.nodes:
        processes = layout.processes(node)
        replicas = [process for process in processes if node and process.name.startswith("inference-")]
        if others := [process for process in processes if process not in replicas]:
            name = f"{run}-node{node}"
            template = _Pod(layout, run, node).template(name, "OnFailure", others, used)
            restarts = max(layout.recipe.launch.restarts * len(others), 1)
            documents["run.yaml"].append(_document("job", run, name, restarts=restarts, template=template))
        for process in replicas:
            name = f"{run}-{_dns_name(process.name)}"
            template = _Pod(layout, run, node).template(name, "Always", [process], used)
            documents["replicas.yaml"].append(_document("deployment", run, name, name=name, template=template))
    port = int(layout.ports["ORCHESTRATOR_PORT"])
    documents["run.yaml"] += [
        _document("service", run, run, port=port, node_0=f"{run}-node0"),
        _document("policy", run, run, run=run),
    ]
    documents["volumes.yaml"] = [_document("claim", run, f"{run}-{volume}") for volume in _VOLUMES if volume in used]
    head = (
        f"# Written, not edited: {written_by(asked, 'kubernetes')} -o DIR\n"
        "# docs/cluster.md says how it is used; changes of your own belong into a kustomization that has this one as resource.\n"
    )
    files = {file: head + "---\n".join(map(plain_yaml, trees)) for file, trees in documents.items() if trees}
    files["kustomization.yaml"] = head + plain_yaml(_kustomization(layout, run, sorted(files)))
    if layout.own_folders() or layout.worlds() or layout.data_root() == "required":  # files of the user's machine
        files_pod = part(_MANIFESTS, "files", name=f"{run}-files", user=USER, claim=f"{run}-files")
        files["files.yaml"] = head + plain_yaml(files_pod)
    return files


def _document(key: str, run: str, name: str, /, **values: object) -> Tree:
    metadata = {"name": name, "labels": {"rollmill.dev/run": run}}
    return part(_MANIFESTS, key, metadata=metadata, **values)


def _kustomization(layout: Layout, run: str, resources: list[str]) -> Tree:
    """Secrets are made from the files of ``rollmill keys`` beside it, and images get the registry of the cluster."""
    images = sorted({image_of(layout, process)[0] for names in layout.names.values() for process in names})
    secrets = []
    for role in sorted({role for roles in layout.roles for role in roles}):
        entries = [f"{file}=keys/{role}/{file}" for file in FILES]
        if (nested := _NESTED.get(Role(role))) is not None:
            entries += [f"{nested.value}.{file}=keys/{role}/{nested.value}/{file}" for file in FILES]
        secrets.append({"name": f"{run}-keys-{role}", "files": entries})
    named = [{"name": image, "newName": image, "newTag": "latest"} for image in images]
    return part(_MANIFESTS, "kustomization", resources=resources, secrets=secrets, images=named)


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
    node: int

    def template(self, name: str, restart: str, processes: Sequence[ProcessSpec], used: set[str]) -> Tree:
        """The template of a Job or a Deployment; ``name`` labels its pods. Adds its volumes to ``used``."""
        layout = self.layout
        grace_s = math.ceil(layout.recipe.launch.stop_grace_s) + 10
        pod = part(_MANIFESTS, "pod", run=self.run, name=name, restart=restart, grace_s=grace_s, user=USER)
        spec = pod["spec"]
        containers = [self._process(process) for process in processes]
        # Containers that make worlds and starting checkpoints, before anything else of node 0 starts.
        makers = [MAKE_WORLDS] if layout.makes_worlds() else []
        makers += [WARM_START] if layout.recipe.warm_start else []
        once = [] if self.node else [self._container(maker) for maker in makers]
        if once:
            spec["initContainers"] = once
        spec["containers"] = containers
        if layout.gpu is not None and any(GPU in each["resources"].get("limits", {}) for each in containers):
            spec["nodeSelector"] = {f"{GPU}.product": layout.gpu}  # the label of NVIDIA's feature discovery
        volumes = dict.fromkeys(m["name"] for each in [*once, *containers] for m in each.get("volumeMounts", []))
        spec["volumes"] = [{"name": volume, **self._volume(volume)} for volume in volumes]
        used |= {*volumes} & {*_VOLUMES}
        return pod

    def _container(self, name: str) -> Tree:
        layout = self.layout
        given = options(layout, settings_in_containers(layout))
        # Kubernetes puts in variables for $(NAME).
        arguments = ["start", layout.path, name, *(each.replace("$(", "$$(") for each in given)]
        variables = container_variables(layout, name, f"{RUNS}/{layout.run_id}")
        if self.node:
            variables[HOST_VARIABLE] = self.run
        if name not in ONCE and named_gpus(layout.recipe, name):
            variables |= own_gpus(name, size_of(layout.recipe, name, self.node).gpus)
        environment: list[Tree] = [{"name": key, "value": value} for key, value in variables.items()]
        if self.node and name.startswith("inference-"):  # a replica
            arguments += ["--replica-id", "$(POD_NAME)"]
            environment.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
        if layout.has_keys:
            environment.append({"name": NODE_HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        # The runtime's profile refuses user namespaces, which the gateway's sandbox needs (tier U).
        gateway = layout.recipe.envgateway
        needs_namespaces = name == "envgateway" and gateway is not None and not gateway.sandbox.allow_tier_0
        container = part(
            _MANIFESTS,
            "container",
            name=name.lower().replace("_", "-"),
            image=image_of(layout, name)[0],
            args=arguments,
            env=environment,
            seccomp="Unconfined" if needs_namespaces else "RuntimeDefault",
        )
        if mounts := self._mounts(name):
            container["volumeMounts"] = mounts
        return container

    def _process(self, process: ProcessSpec) -> Tree:
        """The container of a process, with its size and its probes: the health service, asked with the keys of the container,
        because Kubernetes' own gRPC probes speak no TLS. A process is ready once it serves; one that does not answer for ten
        minutes after that is started again."""
        container = self._container(process.name)
        size = size_of(self.layout.recipe, process.name, self.node)
        memory = {} if size.memory_gib is None else {"memory": f"{size.memory_gib}Gi"}
        container["resources"] = {"requests": {"cpu": str(size.cpus), **memory}}
        if size.gpus:
            container["resources"]["limits"] = {GPU: size.gpus}
        if process.address:  # a rank of a trainer on another node has none: the first rank answers for all
            host, port = host_and_port(process.address)
            by_keys = self.layout.has_keys and not process.name.startswith("trainer-")
            place = f"$NODE_HOST:{port}" if by_keys else f"{host}:{port}"
            command = ["sh", "-c", f"exec python -m services.common.rpc.client {place}"]
            probe: Tree = {"exec": {"command": command}, "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S}
            start_s = (
                self.layout.recipe.ready_timeout_s + 3600
            )  # a service waits for the starting checkpoints of node 0
            container["startupProbe"] = {**probe, "failureThreshold": math.ceil(start_s / _PROBE_S)}
            container["readinessProbe"] = probe
            container["livenessProbe"] = {**probe, "failureThreshold": _HUNG_AFTER}
        return container

    def _mounts(self, name: str) -> list[Tree]:
        kind, layout = name.partition("-")[0], self.layout
        mounts: list[Tree] = []
        if kind not in ("envgateway", MAKE_WORLDS):
            mounts += [{"name": "runs", "mountPath": RUNS}, {"name": "models", "mountPath": MODELS}]
        if layout.makes_worlds():
            mounts.append({"name": "worlds", "mountPath": WORLDS, "readOnly": name != MAKE_WORLDS})
        if layout.data_root() == "required":
            mounts.append({"name": "files", "mountPath": DATA, "subPath": "data", "readOnly": True})
        for place in [*layout.own_folders(), *(layout.worlds() if kind == "envgateway" else [])]:
            inside = place if os.path.isabs(place) else os.path.join(APP, place)
            if place.startswith(f"{CHECKOUT}/"):
                inside = os.path.join(APP, os.path.relpath(place, CHECKOUT))
            mounts.append({"name": "files", "mountPath": inside, "subPath": inside.lstrip("/"), "readOnly": True})
        if layout.has_keys and name not in ONCE:
            mounts.append({"name": f"keys-{role_of(name).value}", "mountPath": KEYS, "readOnly": True})
        if kind in COMPUTING:
            mounts.append({"name": f"shm-{name.lower().replace('_', '-')}", "mountPath": "/dev/shm"})
        return mounts

    def _volume(self, name: str) -> Tree:
        if name.startswith("shm-"):
            gib = shared_memory_gib(self.layout.recipe, self.node)
            return {"emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}
        if name == "worlds":
            return {"emptyDir": {}}
        if name.startswith("keys-"):
            items = [{"key": file, "path": file} for file in FILES]
            if (nested := _NESTED.get(Role(name.removeprefix("keys-")))) is not None:
                items += [{"key": f"{nested.value}.{file}", "path": f"{nested.value}/{file}"} for file in FILES]
            # Readable for the group of the pod alone: a secret that all users may read is refused.
            return {"secret": {"secretName": f"{self.run}-{name}", "defaultMode": 0o440, "items": items}}
        return {"persistentVolumeClaim": {"claimName": f"{self.run}-{name}"}}


# --- SkyPilot

_WORKDIR = "~/sky_workdir"  # where SkyPilot puts the checkout
_PYTHON = ".venv/bin/python"
_SECRET = "ROLLMILL_KEYS_{}"  # with the keys of a role
# Engine, Python and pins of its servers.
_SERVERS = (
    ("sglang", "3.12", "--constraint deploy/docker/inference-sglang.constraints.txt "),
    ("vllm", "3.12", "--constraint extras/vllm/server/constraints.txt "),
)


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
    run = fill(
        TEMPLATES / "run.sky.sh",
        unpack=fill(TEMPLATES / "unpack.sky.sh") if secrets else "",
        run=shlex.quote(layout.run_id),
        arguments=shlex.join([layout.path, "--target", "scripts", *options(layout)]),
        keys=fill(TEMPLATES / "keys.sky.sh", names=" ".join(secrets)) if secrets else "",
        **_shell_lists(layout),
    )
    names = [name for named in layout.names.values() for name in named]
    task = _task(layout, container_name(recipe.name), largest(layout), names, secrets, run)
    task["num_nodes"] = len(layout.nodes)
    files = {"task.yaml": _text(layout, secrets, f"All of {layout.path}", "sky jobs launch task.yaml", task)}
    for name, service in recipe.inference.items() if several else ():
        # Each of its nodes is one more replica, which dials the orchestrator.
        process, secret = f"inference-{name}", _SECRET.format("INFERENCE")
        size = size_of(recipe, process, service.node)
        run = fill(
            TEMPLATES / "replica.sky.sh",
            unpack=fill(TEMPLATES / "unpack.sky.sh"),
            run=shlex.quote(layout.run_id),
            ports=" ".join(f"{key}={value}" for key, value in _replica_variables(layout, name, size).items()),
            arguments=shlex.join([layout.path, process, *options(layout)]),
            name=name,
        )
        replica = _task(layout, f"{container_name(recipe.name)}-{name}", size, [process], [secret], run)
        replica["envs"] = {HOST_VARIABLE: None, **replica.get("envs", {})}
        launch = f"sky launch --num-nodes 4 --env {HOST_VARIABLE}=... replica-{name}.yaml"
        what = f"More replicas of {process} for a run of {layout.path} that goes on"
        files[f"replica-{name}.yaml"] = _text(layout, [secret], what, launch, replica)
    return files


def _task(layout: Layout, name: str, size: Size, processes: list[str], secrets: list[str], run: str) -> Tree:
    resources: Tree = {"cpus": f"{size.cpus}+"}
    if size.memory_gib is not None:
        resources["memory"] = f"{size.memory_gib}+"
    if size.gpus:
        if layout.gpu is None:
            raise ConfigError(
                f"{name} takes {size.gpus} GPUs on a machine, and SkyPilot asks which: write --gpu H100, or another"
            )
        resources["accelerators"] = f"{layout.gpu}:{size.gpus}"
    # For `sky jobs launch`; a machine that is taken away counts apart.
    resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": layout.recipe.launch.restarts}
    task: Tree = {"name": name, "workdir": ".", "resources": resources}
    if secrets:
        task["secrets"] = dict.fromkeys(secrets)
    if layout.data_root() != "none":
        task["envs"] = {DATA_ROOT: None if layout.data_root() == "required" else ""}
    # Folders of this machine at the paths at which the recipe names them; git may ignore those in the checkout.
    mounts = {place: place for place in layout.own_folders()}
    for path in layout.worlds():
        inside = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
        mounts |= {path: path} if inside.startswith("../") else {f"{_WORKDIR}/{inside}": inside}
    if mounts:
        task["file_mounts"] = mounts
    return task | {"setup": _setup(layout, processes), "run": run}


def _setup(layout: Layout, processes: list[str]) -> str:
    """Packages at the versions of the images. Servers have pins of their own, so each has an environment of its own."""
    extras = sorted({name.partition("-")[0] for name in processes})
    if "envgateway" in extras and (environment := layout.environment()):
        extras.append(environment)
    pip = "python3 -m uv pip install --quiet --no-config"  # pyproject.toml constrains uv to the project's own pins
    lines = [
        "set -euo pipefail",
        "python3 -m pip install --quiet uv",
        "python3 -m uv venv --quiet --allow-existing --python 3.11 .venv",
        f"{pip} --python {_PYTHON} --constraint constraints.txt --editable '.[{','.join(extras)}]'",
    ]
    services = [name.partition("-")[2] for name in processes if name.startswith("inference-")]
    engines = {layout.recipe.inference[name].engine for name in services}
    for engine, python, pins in _SERVERS:
        if engine in engines:
            folder = f".venv-{engine}"  # where the engine looks for the interpreter of its servers
            lines += [
                f"python3 -m uv venv --quiet --allow-existing --python {python} {folder}",
                f"{pip} --python {folder}/bin/python {pins}'.[inference,{engine}]'",
                f"touch {folder}/{COMPLETE}",
            ]
    return "\n".join(lines) + "\n"


def _text(layout: Layout, secrets: list[str], what: str, launch: str, task: Tree) -> str:
    command, _, file = launch.rpartition(" ")
    shown = " ".join([command, *(f"--secret {name}" for name in secrets), f"DIR/{file}"])
    head = f"# {what}. Written, not edited: {written_by(layout, 'skypilot')} -o DIR\n# In the checkout: {shown}\n"
    if secrets:
        head += (
            f"# Before: rollmill keys {shlex.quote(layout.path)} -o keys, and for each ROLE in keys\n"
            f'#   export {_SECRET.format("ROLE")}="$(tar -C keys/role -cz . | base64 -w 0)"\n'
        )
    return head + plain_yaml(task)
