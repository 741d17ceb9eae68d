"""Kubernetes manifests of a recipe, for ``kubectl apply -k``: a Job for each node, and a Deployment for each inference
service, whose replicas join and leave while the run goes on.

Inference services get nodes of their own (``spread``), so that each can be scaled; the run then has keys, and every pod
the keys of its processes' roles, as Secrets. The Job of node 0 has the orchestrator, the gateway and the trainers: one
pod, one address, and a container for each. A pod that is lost comes again elsewhere, and the run goes on from its
directory, which lies on a volume that all pods see.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from services.cli.deploy.kubernetes_pods import NESTED, Pod, Tree, claim, needs_files
from services.cli.deploy.layout import USER, Layout, check_images, image_of, lay_out, plain_yaml, written_by
from services.common.errors import ConfigError
from services.common.security.bundle import FILES
from services.common.security.roles import Role

_MAX_NAME = 40  # of 63: kinds, processes and Kubernetes' own endings follow
COPYING_IMAGE = "busybox:1.37.0"  # has the tar that kubectl cp needs
_STORAGE = {"runs": "100Gi", "models": "100Gi", "files": "100Gi"}


def kubernetes_files(
    path: Path, overrides: Sequence[str], profile: str | None, gpu: str | None = None
) -> dict[str, str]:
    """File name -> text of the manifests.

    Raises:
        ConfigError: the recipe has no TLS, names a host, which no pod has before it runs, or an engine without an image.
    """
    asked = lay_out(path, overrides, profile)
    if asked.recipe.security.tls == "off":
        raise ConfigError("pods reach each other over a network: leave out security.tls: off, so that the run has keys")
    if not asked.recipe.is_on_loopback:
        raise ConfigError(
            "a host of the recipe is not loopback, and a pod gets its address when it starts: leave the hosts out"
        )
    check_images(asked)
    layout = lay_out(path, [*overrides, *spread(asked)], profile)
    name = _dns_name(layout.run_id)
    documents: dict[str, list[Tree]] = {"run.yaml": [], "replicas.yaml": []}
    used: set[str] = set()
    for node in layout.nodes:
        processes = layout.processes(node)
        replicas = [process for process in processes if node and process.name.startswith("inference-")]
        others = [process for process in processes if process not in replicas]
        if others:
            pod = Pod(layout, name, node, others, gpu)
            documents["run.yaml"].append(_job(pod))
            used |= pod.claims()
        for process in replicas:
            pod = Pod(layout, name, node, [process], gpu)
            documents["replicas.yaml"].append(_deployment(pod, process.name))
            used |= pod.claims()
    documents["run.yaml"] += [_service(layout, name), _network_policy(name)]
    documents["volumes.yaml"] = [_claim(name, volume) for volume in _STORAGE if volume in used]
    head = (
        f"# Written, not edited: {written_by(asked, 'kubernetes', gpu)} -o DIR\n"
        "# docs/cluster.md says how it is used; changes of your own belong into a kustomization that has this one as resource.\n"
    )
    files = {file: head + "---\n".join(map(plain_yaml, trees)) for file, trees in documents.items() if trees}
    files["kustomization.yaml"] = head + plain_yaml(_kustomization(layout, name, sorted(files)))
    if needs_files(layout):
        files["files.yaml"] = head + plain_yaml(_files_pod(name))
    return files


def spread(layout: Layout) -> list[str]:
    """Overrides that give every inference service a node of its own, behind those of all other processes."""
    services = [f"inference-{name}" for name in layout.recipe.inference]
    held = [node for node, names in layout.names.items() if not set(names) <= set(services)]
    first = max(held, default=0) + 1
    return [f"inference.{name}.node={first + place}" for place, name in enumerate(layout.recipe.inference)]


def _job(pod: Pod) -> Tree:
    """Ends with the run: its processes end with 0 then. ``backoffLimit`` counts restarts of containers."""
    restarts = pod.layout.recipe.launch.restarts * len(pod.processes)
    name = f"{pod.run}-node{pod.node}"
    spec = {"backoffLimit": max(restarts, 1), "template": pod.template(name, "OnFailure")}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(pod.run, name), "spec": spec}


def _deployment(pod: Pod, process: str) -> Tree:
    """``kubectl scale`` changes the number of replicas while the run goes on."""
    name = f"{pod.run}-{_dns_name(process)}"
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"rollmill.dev/process": name}},
        # A replica more would need GPUs that may not be there: an old one leaves before a new one comes.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": pod.template(name, "Always"),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(pod.run, name), "spec": spec}


def _service(layout: Layout, name: str) -> Tree:
    """The name of node 0. Pods find each other before they are ready: each waits for the ones that it needs."""
    port = int(layout.ports["ORCHESTRATOR_PORT"])
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"rollmill.dev/process": f"{name}-node0"},
        "ports": [{"name": "orchestrator", "port": port, "targetPort": port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name, name), "spec": spec}


def _network_policy(name: str) -> Tree:
    """Pods of the run reach each other; no other pod reaches them."""
    own = {"matchLabels": {"rollmill.dev/run": name}}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(name, name),
        "spec": spec,
    }


def _claim(name: str, volume: str) -> Tree:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": _STORAGE[volume]}}}
    metadata = _metadata(name, claim(name, volume))
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _files_pod(name: str) -> Tree:
    """A pod to which files of this machine are copied (``kubectl cp``); not part of the run."""
    container = {
        "name": "files",
        "image": COPYING_IMAGE,
        "command": ["sleep", "infinity"],
        "volumeMounts": [{"name": "files", "mountPath": "/files"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "containers": [container],
        "securityContext": {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "runAsNonRoot": True},
        "automountServiceAccountToken": False,
        "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": claim(name, "files")}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-files"}, "spec": spec}


def _kustomization(layout: Layout, name: str, resources: list[str]) -> Tree:
    """Secrets are made from the files of ``rollmill keys`` beside it, and images get the registry of the cluster."""
    images = sorted({image_of(layout, process).name for names in layout.names.values() for process in names})
    secrets = []
    for role in sorted({role for roles in layout.roles for role in roles}):
        entries = [f"{file}=keys/{role}/{file}" for file in FILES]
        if (nested := NESTED.get(Role(role))) is not None:
            entries += [f"{nested.value}.{file}=keys/{role}/{nested.value}/{file}" for file in FILES]
        secrets.append({"name": f"{name}-keys-{role}", "files": entries})
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
        "secretGenerator": secrets,
        "generatorOptions": {"disableNameSuffixHash": True},  # running pods see renewed keys
        "images": [{"name": image, "newName": image, "newTag": "latest"} for image in images],
    }


def _metadata(run: str, name: str) -> Tree:
    return {"name": name, "labels": {"rollmill.dev/run": run}}


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
