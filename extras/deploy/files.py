"""Writes a deployment of a recipe: launch scripts, or Compose files; the layout that all targets have in common.

Texts of the targets are templates of Jinja (``templates/``).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count, takewhile
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from services.cli.check.memory import shared_memory_gib
from services.cli.keys import role_of
from services.cli.plan import HOST_VARIABLE, NODE_HOST, WARM_START, ProcessSpec, plan
from services.cli.plan import WORLDS as MAKE_WORLDS
from services.cli.profiles import load_for_any_machine
from services.common.config.loading import port_variables, set_at, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.extras import provided
from services.common.installing import IN_CHECKOUT, ROOT
from services.common.net.hosts import host_and_port
from services.common.security.keys import VARIABLE as KEYS_VARIABLE
from services.common.system.machine import LOOPBACK
from services.orchestrator.tasks.rows import DATA_ROOT, known

CHECKOUT = ROOT
TEMPLATES = Path(__file__).parent / "templates"
Tree = dict[str, Any]

# Where ports of their own begin, by the beginning of the variable that sets them.
_FIRST_PORTS = {
    "ORCHESTRATOR": 50050,
    "INFERENCE": 50061,
    "TRAINER": 50071,
    "ENVGATEWAY": 50080,
    "TASK": 5000,
    "CODE": 8000,
    "WEIGHTS": 19861,
}
_FIRST_METRICS_PORT = 9464

RUNS = "/runs"
WORLDS = f"{RUNS}/worlds"  # where a profile makes worlds, below run.dir
MODELS = "/models"  # HF_HOME of the images
DATA = "/data"
KEYS = "/keys"
APP = "/app"  # where the images have the checkout
USER = 10001  # of the images
COMPUTING = ("inference", "trainer")  # kinds of processes that compute on GPUs

_MAKERS = {WARM_START: "trainer", MAKE_WORLDS: "envgateway"}
ONCE = tuple(_MAKERS)  # containers that end before the run begins
_ARGUMENTS = ("BASE_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")  # those that are set where it is built


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A recipe with a number for every port, and the arguments with which its processes load the recipe."""

    recipe: Recipe
    path: str  # relative to the checkout, which images and nodes have as their working directory; else absolute
    source: Path  # as the user named it
    overrides: tuple[str, ...]
    profile: str | None
    gpu: str | None  # the kind of GPU that a scheduler is asked for
    ports: Mapping[str, str]  # variable -> port
    metrics_ports: Mapping[str, int] = field(default_factory=dict)  # process -> port; empty where metrics are off

    @property
    def nodes(self) -> list[int]:
        """The nodes that the recipe names, 0 first."""
        return self.recipe.nodes()

    @property
    def run_id(self) -> str:
        """The run's id where the recipe names none."""
        return self.recipe.run.id or self.recipe.name

    @property
    def has_keys(self) -> bool:
        """Whether processes have keys: of a run over several nodes, or one that asks for them."""
        return len(self.nodes) > 1 or self.recipe.needs_keys

    def processes(self, node: int) -> list[ProcessSpec]:
        """The processes of a node, as ``rollmill run`` and ``rollmill start`` know them."""
        return plan(self.recipe, Path(), node)

    @property
    def names(self) -> dict[int, list[str]]:
        """The names of the processes of each node."""
        return {node: [process.name for process in self.processes(node)] for node in self.nodes}

    @property
    def roles(self) -> list[list[str]]:
        """The roles of the processes of each node, as the folders of their keys are named."""
        return [sorted({role_of(name).value for name in names}) for names in self.names.values()]

    def data_root(self) -> Literal["none", "optional", "required"]:
        """Whether the deployment reads files of ``ROLLMILL_DATA_ROOT``: required for a dataset on no hub; a profile
        takes files there and makes the rest."""
        sections = self.recipe.data.sections().values()
        datasets = [known(section.name) for section in sections if section.name is not None]
        if self.profile is not None:
            return "optional" if datasets else "none"
        files = [dataset for dataset in datasets if dataset.indices is None]
        if any(dataset.hub is None for dataset in files):
            return "required"
        return "optional" if files else "none"

    def environment(self) -> str:
        """The first environment that the gateway plays with an engine or data of its own; empty for none."""
        gateway = self.recipe.envgateway
        names = {str(workflow.settings.get("environment", "")) for workflow in self.recipe.workflows().values()}
        own = [name for name in ("alfworld", "textworld", "webshop") if name in names]
        return next(
            (name for name in own if gateway is not None and name not in (gateway.extra("agentbench") or {})), ""
        )

    def own_folders(self) -> list[str]:
        """Folders of the user that every process reads: the recipe's, those of its modules and those of its files of rows.
        Empty for a recipe of Rollmill, which images and other nodes have."""
        if not os.path.isabs(self.path):
            return []
        recipe = Path(self.path)
        found = {recipe if recipe.is_dir() else recipe.parent, *map(Path, self.recipe.modules)}
        paths = [Path(section.path) for section in self.recipe.data.sections().values() if section.path is not None]
        found |= {path.parent for path in paths if path.is_absolute()}
        models = [Path(policy.model.path) for policy in self.recipe.policies.values() if policy.model.path is not None]
        found |= {path for path in models if path.is_absolute()}
        outside = [path for path in found if not path.is_relative_to(CHECKOUT)]
        return sorted(str(path) for path in outside if not any(other in path.parents for other in outside))

    def makes_worlds(self) -> bool:
        """Whether the profile finds or makes the world of the environment at the start
        (``services.cli.profiles``)."""
        return self.profile is not None and self.environment() in ("alfworld", "webshop")

    @property
    def makers(self) -> list[str]:
        """Containers of node 0 that make a world and starting checkpoints, and end before the others start."""
        return [*([MAKE_WORLDS] if self.makes_worlds() else []), *([WARM_START] if self.recipe.warm_start else [])]

    def folders_of(self, kind: str) -> dict[str, str]:
        """Files and folders of this machine that a container reads: relative to the checkout, or absolute outside of it -> the
        absolute path in the container."""
        found = {}
        for path in [*(self.worlds() if kind == "envgateway" else []), *self.own_folders()]:
            place = os.path.relpath(path, CHECKOUT) if os.path.isabs(path) else path
            found.update({path: path} if place.startswith("../") else {place: os.path.join(APP, place)})
        return found

    def worlds(self) -> list[str]:
        """Files and folders that the gateway reads; those beside the recipe are absolute."""
        gateway = self.recipe.envgateway
        if gateway is None or self.makes_worlds():
            return []
        sections = [gateway.extra(name) or () for name in provided("environments")]
        found = sorted({value for section in sections for _, value in section if isinstance(value, Path)})
        return [str(path) for path in found if not any(other in path.parents for other in found)]


def lay_out(path: Path, overrides: Sequence[str] = (), profile: str | None = None, gpu: str | None = None) -> Layout:
    """Read a recipe and give every open port (0) a number of its own.

    Environment variables and files of this machine do not count: the output depends on the recipe, the overrides
    and the profile alone.

    Raises:
        ConfigError: the recipe cannot run.
    """
    tree = load_for_any_machine(path, overrides, profile).model_dump(mode="json")
    paths = port_variables(tree)
    given: dict[str, Any] = {name: reduce(getitem, place, tree) for name, place in paths.items()}  # type: ignore[arg-type]
    held = {int(value) for value in given.values() if value}
    for name, port in given.items():
        if port == 0:
            free = (port for port in count(_FIRST_PORTS[name.partition("_")[0]]) if port not in held)
            given[name] = next(free)
            set_at(tree, paths[name], given[name])
            held.add(given[name])
    recipe = validate(tree, source=str(path))
    metrics_ports: dict[str, int] = {}
    if recipe.metrics.enabled:  # its own port, or the next free one
        free = (port for port in count(_FIRST_METRICS_PORT) if port not in held)
        named = [name for name in recipe.processes_with_metrics() if name != "worker"]  # deployed by itself
        metrics_ports = {name: recipe.metrics.ports.get(name) or next(free) for name in named}
    # A recipe of Rollmill relative to the checkout, which images and other nodes have, or by name where Rollmill is
    # installed; another one by its absolute path, at which the other machines must have its folder.
    place = str(path.resolve())
    if path.resolve().is_relative_to(CHECKOUT / "recipes"):
        place = path.resolve().relative_to(CHECKOUT).as_posix()
        if not IN_CHECKOUT:
            place = place.removeprefix("recipes/").removesuffix(".yaml").removesuffix("/recipe")
    return Layout(
        recipe=recipe,
        path=place,
        source=path,
        overrides=tuple(overrides),
        profile=profile,
        gpu=gpu,
        ports={name: str(port) for name, port in given.items() if port is not None},
        metrics_ports=metrics_ports,
    )


# --- texts


_JINJA = Environment(
    loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True, comment_start_string="{//#",  # ``{#`` is of the shell
)  # fmt: skip
_JINJA.policies["json.dumps_kwargs"] = {}  # keys stay in their order


def render(template: str, /, **values: object) -> str:
    """The text of a template."""
    return _JINJA.get_template(template).render(values)


def render_yaml(template: str, /, **values: object) -> str:
    """The comments at the top of a template, and its documents, each object written out."""
    text = render(template, **values)
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return head + "---\n".join(map(plain_yaml, yaml.safe_load_all(text)))


def options(layout: Layout, more: Sequence[str] = ()) -> list[str]:
    """Overrides, ``more`` ones and the profile as arguments."""
    profile = [] if layout.profile is None else ["--profile", layout.profile]
    return [*(part for override in (*layout.overrides, *more) for part in ("--set", override)), *profile]


def written_by(layout: Layout, target: str) -> str:
    """The command that writes the layout again, without the directory."""
    kind = [] if layout.gpu is None or target == "scripts" else ["--gpu", layout.gpu]
    return shlex.join(["rollmill", "deploy", layout.path, "--target", target, *options(layout), *kind])


def other_variables(layout: Layout, where: str) -> str:
    """What the head of a script says after its own variables: the folders that machines must have."""
    told = ", ROLLMILL_DATA_ROOT (folder of local datasets)" if layout.data_root() != "none" else ""
    folders = layout.own_folders()
    return told + (f". Needs at the same paths on {where}: {', '.join(folders)}" if folders else "")


class _Plain(yaml.SafeDumper):
    """Writes no anchors, so that each object can be read by itself, and text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def plain_yaml(tree: Mapping[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)


def launch_scripts(layout: Layout, _place: Path) -> dict[str, str]:
    """File name -> text, for every node of the recipe: ``node0.sh``, ``node0-orchestrator.sh``, ...

    Every script passes its own arguments on, such as ``--profile tiny``, so they must be the same on every node.
    """
    files = {}
    written, variables = written_by(layout, "scripts"), other_variables(layout, "this node")
    for node, names in layout.names.items():
        head = {"layout": layout, "node": node, "names": names, "written_by": written, "variables": variables}
        files[f"node{node}.sh"] = render("node.sh", **head)
        for name in names:
            arguments = shlex.join([layout.path, name, *options(layout)])
            files[f"node{node}-{name}.sh"] = render("process.sh", name=name, arguments=arguments, **head)
    return files


# --- containers, of Compose and of Kubernetes


def check_images(layout: Layout) -> None:
    """Raises ``ConfigError`` for a recipe with a process that has no image."""
    if without := [name for name, service in layout.recipe.inference.items() if service.engine == "vllm"]:
        raise ConfigError(
            f"inference.{without[0]}.engine is vllm, for which there is no image: write sglang, or launch scripts with "
            "--target scripts on machines that have vLLM"
        )


def image_of(layout: Layout, process: str) -> tuple[str, str, list[str]]:
    """The image of a process of the plan, or of a container that makes checkpoints or worlds before the run: its name, the
    Dockerfile in the checkout, and the names (or ``NAME=VALUE``) of its build arguments."""
    kind, _, name = process.partition("-")
    kind = _MAKERS.get(process, kind)
    if kind == "inference" and layout.recipe.inference[name].engine == "sglang":  # its pins are not the others'
        return "rollmill-inference-sglang", "deploy/docker/inference-sglang.Dockerfile", list(_ARGUMENTS)
    extras, more, gateway = [kind], [], layout.recipe.envgateway
    if kind == "envgateway" and (environment := layout.environment()):
        extras.append(environment)
        # A profile tags without spaCy.
        if (
            environment == "webshop"
            and layout.profile is None
            and gateway
            and gateway.extra("webshop").tagger != "words"
        ):
            more = [f"SPACY_MODEL={gateway.extra('webshop').tagger}"]
    arguments = [*_ARGUMENTS, f"EXTRAS={','.join(extras)}", *more]
    return f"rollmill-{'-'.join(extras)}", "deploy/docker/service.Dockerfile", arguments


def settings_in_containers(layout: Layout) -> list[str]:
    """Overrides that every container of a deployment has: ports of metrics, and where a profile makes worlds."""
    metrics = [f"metrics.ports.{process}={port}" for process, port in layout.metrics_ports.items()]
    return [*metrics, *([f"run.dir={RUNS}"] if layout.makes_worlds() else [])]


def container_variables(layout: Layout, name: str, run_dir: str) -> dict[str, str]:
    """Variables of the container of a process, or of one that makes checkpoints or worlds, which has no keys."""
    variables = {**layout.ports, "RUN_DIR": run_dir}
    if layout.data_root() != "none":
        variables[DATA_ROOT] = DATA
    if layout.has_keys and name not in ONCE:
        variables[KEYS_VARIABLE] = KEYS
    return variables


def container_name(name: str) -> str:
    """A recipe's name as Compose takes it: lower case, digits, ``-`` and ``_``.

    >>> container_name("My run/7")
    'rollmill-my-run-7'
    """
    return "rollmill-" + re.sub("[^a-z0-9_-]", "-", name.lower())


# --- Compose

NO_DATA = "no-data"  # an empty volume, where no folder is named
SECCOMP = "deploy/docker/seccomp.json"


def compose_files(layout: Layout, place: Path) -> dict[str, str]:
    """File name -> text: ``compose.yaml`` and ``compose.gpu.yaml``, with the prefix ``nodeN.`` for several nodes; with
    metrics also ``prometheus.yml`` and the dashboard of Grafana.

    On one node without keys, services bind loopback only and cannot authenticate callers. So their containers share the
    network namespace of one idle container, ``node``: loopback is then the pod's, and a restarted service finds the others.
    Only ``forwarder`` listens outside of it, for the orchestrator's port, which is published on the host's loopback (ADR
    19). On several nodes, containers use the host's network, the keys of their own role, and TLS.

    With the file for GPUs, trainers and inference services also share the /dev/shm of ``node``, through which they hand
    over weights, and its process ids, by which they name their files there. Without it, weights go through the publisher's
    port: podman-compose cannot share either. The gateway runs untrusted programs, shares neither, and has no access to
    the run directory.

    ``place`` is their directory.

    Raises:
        ConfigError: this is no checkout, a host on one node is not loopback, or another node needs files that node 0 makes, or
            an engine has no image.
    """
    if not IN_CHECKOUT:
        raise ConfigError("compose takes files of a checkout: run `rollmill deploy` of one, or write --target scripts")
    context, several = os.path.relpath(CHECKOUT, place), len(layout.nodes) > 1
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
        files["prometheus.yml"] = render_yaml("prometheus.yml", layout=layout)
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
        recipe, processes = self.layout.recipe, self.layout.processes(self.number)
        names = [*self.layout.makers, *(process.name for process in processes)]
        mounts = [m for name in names for m in self.mounts(name) if isinstance(m, str)]
        # Those that are mounted. Models are shared by all recipes of this machine.
        known: Tree = {"runs": {}, "models": {"name": "rollmill-models"}, "worlds": {}, NO_DATA: {}}
        volumes = {name: known[name] for name in known if any(f"{name}:" in m or f"-{name}}}:" in m for m in mounts)}
        name = container_name(recipe.name) + (f"-node{self.number}" if self.several else "")
        return self._file("compose.yaml", name=name, processes=processes, volumes=volumes)

    def gpu_file(self, below: str) -> str:
        """The overlay for GPUs: devices for the processes that compute on them, and shared memory for their weights."""
        recipe, names = self.layout.recipe, self.layout.names[self.number]
        devices = {f"inference.{name}.device": service.device for name, service in recipe.inference.items()}
        devices |= {
            f"policies.{name}.trainer.device": policy.trainer.device for name, policy in recipe.trained_policies.items()
        }
        forced = tuple(f"{where}=cuda" for where, device in devices.items() if device == "cpu")
        computing = [name for name in names if name.partition("-")[0] in COMPUTING]
        changed = [*([WARM_START] if recipe.warm_start else []), *names] if forced else computing
        gib = shared_memory_gib(recipe, self.number)
        values = {"below": below, "forced": forced, "computing": computing, "changed": changed, "shared_gib": gib}
        return self._file("compose.gpu.yaml", **values)

    def _file(self, template: str, **values: object) -> str:
        gateway = self.layout.recipe.envgateway
        return render_yaml(
            template,
            node=self,
            layout=self.layout,
            image_of=image_of,
            written_by=written_by(self.layout, "compose"),
            tier_0=gateway is not None and gateway.sandbox.allow_tier_0,
            **values,
        )

    @property
    def seccomp(self) -> str:
        """The path of the gateway's profile."""
        return os.path.join(self.context, SECCOMP)

    def health_address(self, process: ProcessSpec) -> str:
        host, port = host_and_port(process.address)
        is_dialled = self.several and not process.name.startswith("trainer-")
        return f"{self._own_address(LOOPBACK) if is_dialled else host}:{port}"

    def variables(self, name: str) -> dict[str, str]:
        there = f"{RUNS}/{self.layout.run_id}" + (f"-node{self.number}" if self.number else "")
        variables = container_variables(self.layout, name, there)  # the gateway's own; no other container mounts it
        if self.several:
            variables[NODE_HOST] = self._own_address("")
        if self.number:
            variables[HOST_VARIABLE] = f"${{{HOST_VARIABLE}:?set it to the name or address of node 0}}"
        return variables

    def _own_address(self, otherwise: str) -> str:
        """The address that other nodes dial on this node: on node 0 and at the gateway."""
        if self.number == 0 or "envgateway" in self.layout.names[self.number]:
            return f"${{{NODE_HOST}:?set it to the name or address of this machine that other nodes dial}}"
        return f"${{{NODE_HOST}:-{otherwise}}}"

    def mounts(self, name: str) -> list[Any]:
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
        for source, target in layout.folders_of(kind).items():
            if not os.path.isabs(source):
                source = os.path.join(self.context, source)
                source = source if source.startswith(("/", ".")) else f"./{source}"
            # In the long syntax, because the short one creates a missing folder.
            bind = {"type": "bind", "source": source, "target": target, "read_only": True}
            mounts.append({**bind, "bind": {"create_host_path": False}})
        if layout.has_keys and name not in ONCE:
            keys = f"${{{KEYS_VARIABLE}:?set it to the directory that rollmill keys made}}"
            mounts.append(f"{keys}/{role_of(name).value}:{KEYS}:ro")
        return mounts

    def command(self, name: str, more: Sequence[str] = ()) -> list[str]:
        given = options(self.layout, [*settings_in_containers(self.layout), *more])
        return ["start", self.layout.path, name, *(each.replace("$", "$$") for each in given)]  # compose substitutes it
