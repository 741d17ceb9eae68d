"""The compose files of a recipe: one container for each process, on one machine.

Without keys services bind loopback only and know nobody who calls. So their containers share the network namespace of
one container that does nothing else, ``node``: loopback is then the pod's, no port is published, and a service that is
started again finds the others. Trainers and inference services also share its /dev/shm, through which they hand over
weights, and its process ids, by which they name what they leave there. The gateway, which runs strangers' programs,
shares neither, and sees no run directory.
"""

from __future__ import annotations

from typing import Any

import yaml

from services.cli.deploy.layout import Layout, settings, written_by
from services.cli.plan import ProcessSpec
from services.cli.start import WARM_START
from services.common.errors import ConfigError

RUNS = "/runs"
DATA = "/data"
POD = "node"
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
PROMETHEUS_PORT = 9090
# Room for a few versions of the weights; the file system gives only what is used.
SHARED_MEMORY = "8gb"

Service = dict[str, Any]


def compose_file(layout: Layout, context: str) -> str:
    """The text of ``compose.yaml``; ``context`` is the way from its directory to the checkout.

    Raises ``ConfigError`` for a recipe over several nodes, and for one with keys, which nobody is there to hand out.
    """
    if layout.nodes != [0]:
        raise ConfigError(
            f"{layout.path} runs on nodes {', '.join(map(str, layout.nodes))}, and a compose file is for one machine: "
            "write launch scripts with --target scripts"
        )
    if layout.recipe.needs_keys:
        raise ConfigError(
            "security.tls is on, or a host is not loopback, and a compose file has no keys: its containers share a loopback "
            "that nothing else reaches; leave these settings out, or start the images with keys (docs/deploy.md, Containers "
            "on several hosts)"
        )
    services: dict[str, Service] = {POD: _pod(context)}
    if layout.metrics_ports:
        services[POD]["ports"] = [f"127.0.0.1:{PROMETHEUS_PORT}:{PROMETHEUS_PORT}"]
        services["prometheus"] = _prometheus()
    if layout.recipe.warm_start:
        services[WARM_START] = _warm_start(layout, context)
    services |= {process.name: _service(layout, process, context) for process in layout.processes(0)}
    tree = {"name": f"millrace-{layout.recipe.name}", "services": services, "volumes": {"runs": {}}}
    return _text(layout, "CPU, one machine.", tree)


def gpu_file(layout: Layout) -> str:
    """The text of ``compose.gpu.yaml``, which goes on top of the other: GPUs for what computes on them.

    All GPUs are shown to a container; which of them a process takes is the recipe's to say (``gpus``).
    """
    recipe = layout.recipe
    devices = {f"inference.{name}.device": service.device for name, service in recipe.inference.items()}
    devices |= {f"policies.{name}.trainer.device": policy.trainer.device for name, policy in recipe.policies.items()}
    forced = tuple(f"{where}=cuda" for where, device in devices.items() if device == "cpu")
    gpus = {"resources": {"reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}}
    names = [process.name for process in layout.processes(0)]
    services: dict[str, Service] = {}
    for name in [*([WARM_START] if layout.recipe.warm_start else []), *names]:
        service: Service = {"command": _command(layout, name, forced)} if forced else {}
        if name.startswith(("inference-", "trainer-")):
            service["deploy"] = gpus
        if service:
            services[name] = service
    return _text(layout, "On top of compose.yaml, for a machine with GPUs.", {"services": services})


def _pod(context: str) -> Service:
    """Holds the namespaces that the others share."""
    return {
        **_image("orchestrator", context),
        **_hardened(),
        "entrypoint": ["sleep", "infinity"],
        "init": True,
        "ipc": "shareable",
        "shm_size": SHARED_MEMORY,
        "healthcheck": {"disable": True},
        "restart": "unless-stopped",
    }


def _prometheus() -> Service:
    """Asks all processes of the pod; only with ``--profile metrics``. Answers this machine alone, without a password."""
    return {
        "image": PROMETHEUS_IMAGE,
        "profiles": ["metrics"],
        **_hardened(),
        "command": ["--config.file=/etc/prometheus/prometheus.yml", f"--web.listen-address=:{PROMETHEUS_PORT}"],
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
        "network_mode": f"service:{POD}",
        "depends_on": {POD: {"condition": "service_started"}},
        "restart": "unless-stopped",
    }


def _warm_start(layout: Layout, context: str) -> Service:
    """Makes the starting checkpoints once, with the trainer's packages; then the orchestrator begins."""
    return {
        **_image("trainer", context),
        **_hardened(),
        **_mounts(layout),
        "command": _command(layout, WARM_START),
        "environment": _environment(layout, WARM_START),
        "network_mode": "none",
        "healthcheck": {"disable": True},
    }


def _service(layout: Layout, process: ProcessSpec, context: str) -> Service:
    kind, _, name = process.name.partition("-")
    # SGLang's pins are not those of the other images.
    with_sglang = kind == "inference" and layout.recipe.inference[name].engine == "sglang"
    service: Service = {
        **_image("inference-sglang" if with_sglang else kind, context),
        **_hardened(),
        "command": _command(layout, process.name),
        "environment": _environment(layout, process.name),
        "network_mode": f"service:{POD}",
        "depends_on": {POD: {"condition": "service_started"}},
        "healthcheck": {"test": ["CMD", "python", "-m", "services.common.rpc.health", process.address]},
        "restart": f"on-failure:{layout.recipe.launch.restarts}",
        "stop_grace_period": f"{layout.recipe.launch.stop_grace_s:g}s",
    }
    if kind == "envgateway":
        if layout.needs_data():
            service["volumes"] = [_data()]
    else:
        service |= _mounts(layout)
    if kind in ("orchestrator", "envgateway"):
        service["init"] = True  # the others have that of the pod
    if kind in ("inference", "trainer"):
        service |= {"ipc": f"service:{POD}", "pid": f"service:{POD}"}
        service["depends_on"]["orchestrator"] = {"condition": "service_started"}  # itself only after the warm start
    if kind == "orchestrator" and layout.recipe.warm_start:
        service["depends_on"][WARM_START] = {"condition": "service_completed_successfully"}
    return service


def _image(kind: str, context: str) -> Service:
    build = {
        "context": context,
        "dockerfile": f"deploy/docker/{kind}.Dockerfile",
        "args": ["BASE_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"],  # those that are set where it is built
    }
    return {"image": f"millrace-{kind}", "build": build}


def _hardened() -> Service:
    return {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


def _mounts(layout: Layout) -> Service:
    return {"volumes": [f"runs:{RUNS}", *([_data()] if layout.needs_data() else [])]}


def _data() -> str:
    return f"${{MILLRACE_DATA_ROOT:?set it to the folder of local datasets}}:{DATA}:ro"


def _command(layout: Layout, name: str, more: tuple[str, ...] = ()) -> list[str]:
    metrics = [f"metrics.ports.{process}={port}" for process, port in layout.metrics_ports.items()]
    arguments = [_escaped(part) for part in settings([*layout.overrides, *metrics, *more])]
    if name == "envgateway":  # its image starts the gateway itself, without a run directory
        return ["--recipe", layout.path, *arguments]
    return ["start", layout.path, name, *arguments]


def _environment(layout: Layout, name: str) -> dict[str, str]:
    variables = dict(layout.ports)
    if name == "envgateway":  # the others are started by a command that knows what they need
        variables["OMP_NUM_THREADS"] = "1"
    else:
        variables["RUN_DIR"] = f"{RUNS}/{layout.recipe.run.id or layout.recipe.name}"
    if layout.needs_data():
        variables["MILLRACE_DATA_ROOT"] = DATA
    return variables


def _escaped(text: str) -> str:
    """Compose replaces what follows a dollar sign."""
    return text.replace("$", "$$")


class _Plain(yaml.SafeDumper):
    """Writes no anchors: each service can be read by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(layout: Layout, what: str, tree: dict[str, Any]) -> str:
    sandbox = layout.recipe.envgateway and layout.recipe.envgateway.sandbox
    isolation = ""
    if sandbox and sandbox.allow_tier_0:
        isolation = (
            "# envgateway.sandbox.allow_tier_0 is set: where the engine allows the gateway no user namespaces, programs that\n"
            "# the policy writes run with limits, but without isolation from the gateway (docs/deploy.md).\n"
        )
    published = "Only Prometheus is published, to this machine" if layout.metrics_ports else "Nothing is published"
    head = (
        f"# {what} Written, not edited: {written_by(layout, 'compose')} -o DIR\n"
        f"# docs/deploy.md says how it is used. {published}: services answer inside the pod only.\n"
    )
    return head + isolation + yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
