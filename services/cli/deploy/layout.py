"""The parts of a deployment: the processes of a recipe on every node, and ports that all of them know."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import yaml

from services.cli.deploy.metrics import with_ports
from services.cli.keys.process_keys import role_of
from services.cli.plan.profiles import load_for_any_machine
from services.cli.plan.specs import ProcessSpec, plan
from services.cli.run.start import WARM_START
from services.cli.run.start import WORLDS as MAKE_WORLDS
from services.common.config.reading.loading import port_variables, set_at, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import IN_CHECKOUT, ROOT
from services.common.security.bundle import VARIABLE as KEYS_VARIABLE
from services.orchestrator.tasks.catalogue import DATA_ROOT, known

CHECKOUT = ROOT

Need = Literal["none", "optional", "required"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A recipe with a number for every port, and the arguments with which its processes load the recipe."""

    recipe: Recipe
    path: str  # relative to the checkout, which images and nodes have as their working directory; else absolute
    overrides: tuple[str, ...]
    profile: str | None
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

    def data_root(self) -> Need:
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
        return next((name for name in own if gateway is not None and name not in gateway.agentbench), "")

    def tagger_model(self) -> str:
        """spaCy's model, if the shop's tagger needs one; else empty. A profile tags without."""
        gateway = self.recipe.envgateway
        if gateway is None or self.environment() != "webshop" or self.profile is not None:
            return ""
        return gateway.webshop.spacy_model if gateway.webshop.tagger == "spacy" else ""

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
        (``services.cli.plan.profiles``)."""
        return self.profile is not None and self.environment() in ("alfworld", "webshop")

    def worlds(self) -> list[Path]:
        """Files and folders that the gateway reads; those beside the recipe are absolute."""
        gateway = self.recipe.envgateway
        if gateway is None or self.makes_worlds():
            return []
        named = [gateway.alfworld.data, gateway.alfworld.games, gateway.textworld.games]
        named += [gateway.webshop.data, gateway.webshop.goals]
        found = sorted({path for path in named if path is not None})
        return [path for path in found if not any(other in path.parents for other in found)]


def lay_out(path: Path, overrides: Sequence[str] = (), profile: str | None = None) -> Layout:
    """Read a recipe and give every open port (0) a number of its own.

    Environment variables and files of this machine do not count: the output depends on the recipe, the overrides
    and the profile alone.

    Raises:
        ConfigError: the recipe cannot run.
    """
    tree = load_for_any_machine(path, overrides, profile).model_dump(mode="json")
    held = {int(value) for value in _ports(tree).values() if value}
    paths = port_variables(tree)
    for name, port in _ports(tree).items():
        if port == 0:
            first = _FIRST_PORTS[name.partition("_")[0]]
            chosen = next(port for port in count(first) if port not in held)
            set_at(tree, paths[name], chosen)
            held.add(chosen)
    recipe = validate(tree, source=str(path))
    ports = {name: str(port) for name, port in _ports(tree).items() if port is not None}
    metrics_ports = with_ports(recipe, held) if recipe.metrics.enabled else {}
    return Layout(
        recipe=recipe,
        path=_place_of(path),
        overrides=tuple(overrides),
        profile=profile,
        ports=ports,
        metrics_ports=metrics_ports,
    )


def options(layout: Layout, more: Sequence[str] = ()) -> list[str]:
    """Overrides, ``more`` ones and the profile as arguments."""
    profile = [] if layout.profile is None else ["--profile", layout.profile]
    return [*(part for override in (*layout.overrides, *more) for part in ("--set", override)), *profile]


def written_by(layout: Layout, target: str, gpu: str | None = None) -> str:
    """The command that writes the layout again, without the directory."""
    kind = [] if gpu is None else ["--gpu", gpu]
    return shlex.join(["rollmill", "deploy", layout.path, "--target", target, *options(layout), *kind])


def _ports(tree: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: reduce(getitem, path, tree) for name, path in port_variables(tree).items()}  # type: ignore[misc, arg-type]


def _place_of(path: Path) -> str:
    """A recipe of Rollmill relative to the checkout, which images and other nodes have, or by name where Rollmill is installed;
    another one by its absolute path, at which the other machines must have its folder."""
    resolved = path.resolve()
    if not resolved.is_relative_to(CHECKOUT / "recipes"):
        return str(resolved)
    place = resolved.relative_to(CHECKOUT).as_posix()
    return place if IN_CHECKOUT else place.removeprefix("recipes/").removesuffix(".yaml").removesuffix("/recipe")


RUNS = "/runs"
WORLDS = f"{RUNS}/worlds"  # where a profile makes worlds, below run.dir
MODELS = "/models"  # HF_HOME of the images
DATA = "/data"
KEYS = "/keys"
APP = "/app"  # where the images have the checkout
USER = 10001  # of the images

_MAKERS = {WARM_START: "trainer", MAKE_WORLDS: "envgateway"}
ONCE = tuple(_MAKERS)  # containers that end before the run begins
_ARGUMENTS = ("BASE_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")  # those that are set where it is built


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image: its name, the Dockerfile in the checkout, and the names (or ``NAME=VALUE``) of its build arguments."""

    name: str
    dockerfile: str
    arguments: tuple[str, ...]


def check_images(layout: Layout) -> None:
    """Raises ``ConfigError`` for a recipe with a process that has no image."""
    if without := [name for name, service in layout.recipe.inference.items() if service.engine == "vllm"]:
        raise ConfigError(
            f"inference.{without[0]}.engine is vllm, for which there is no image: write sglang, or launch scripts with "
            "--target scripts on machines that have vLLM"
        )


def image_of(layout: Layout, process: str) -> Image:
    """The image of a process of the plan, or of a container that makes checkpoints or worlds before the run."""
    kind, _, name = process.partition("-")
    kind = _MAKERS.get(process, kind)
    if kind == "inference" and layout.recipe.inference[name].engine == "sglang":  # its pins are not the others'
        return _image("inference-sglang", "inference-sglang", _ARGUMENTS)
    extras = [kind]
    arguments = list(_ARGUMENTS)
    if kind == "envgateway" and (environment := layout.environment()):
        extras.append(environment)
    arguments.append(f"EXTRAS={','.join(extras)}")
    if kind == "envgateway" and (model := layout.tagger_model()):
        arguments.append(f"SPACY_MODEL={model}")
    return _image("-".join(extras), "service", tuple(arguments))


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


def other_variables(layout: Layout, where: str) -> str:
    """What the head of a script says after its own variables: the folders that machines must have."""
    told = ", ROLLMILL_DATA_ROOT (folder of local datasets)" if layout.data_root() != "none" else ""
    folders = layout.own_folders()
    return told + (f". Needs at the same paths on {where}: {', '.join(folders)}" if folders else "")


def own_gpus(process: str, number: int) -> dict[str, str]:
    """The variable that names the GPUs of a process which has its own alone, numbered from 0, as in a container."""
    variable = process.partition("-node")[0].upper().replace("-", "_")
    return {f"{variable}_GPUS": ",".join(map(str, range(number)))}


def plain_yaml(tree: Mapping[str, Any]) -> str:
    """YAML without anchors: each object can be read by itself."""
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def container_name(name: str) -> str:
    """A recipe's name as Compose takes it: lower case, digits, ``-`` and ``_``.

    >>> container_name("My run/7")
    'rollmill-my-run-7'
    """
    return "rollmill-" + re.sub("[^a-z0-9_-]", "-", name.lower())


def _image(name: str, dockerfile: str, arguments: tuple[str, ...]) -> Image:
    return Image(name=f"rollmill-{name}", dockerfile=f"deploy/docker/{dockerfile}.Dockerfile", arguments=arguments)
