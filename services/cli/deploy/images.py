"""The images of a deployment: which one each process takes, its build arguments, and the places in its containers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.cli.deploy.layout import Layout
from services.cli.run.start import WARM_START
from services.cli.run.start import WORLDS as MAKE_WORLDS
from services.common.errors import ConfigError

RUNS = "/runs"
WORLDS = f"{RUNS}/worlds"  # where a profile makes worlds, below run.dir
MODELS = "/models"  # HF_HOME of the images
DATA = "/data"
KEYS = "/keys"
APP = "/app"  # where the images have the checkout
USER = 10001  # of the images

_MAKERS = {WARM_START: "trainer", MAKE_WORLDS: "envgateway"}
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


def container_name(name: str) -> str:
    """A recipe's name as Compose takes it: lower case, digits, ``-`` and ``_``.

    >>> container_name("My run/7")
    'millrace-my-run-7'
    """
    return "millrace-" + re.sub("[^a-z0-9_-]", "-", name.lower())


def _image(name: str, dockerfile: str, arguments: tuple[str, ...]) -> Image:
    return Image(name=f"millrace-{name}", dockerfile=f"deploy/docker/{dockerfile}.Dockerfile", arguments=arguments)
