"""What a machine must have before a recipe is started on it: data, GPUs, packages, memory, worlds.

`millrace run` refuses here, before any process starts, what would otherwise end a run hours later. A recipe that passes
``check`` may still be refused on a machine that is not meant to run it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from services.cli.gpus_here import gpu_problems, gpus_here
from services.cli.memory_estimate import misfits
from services.cli.model_files import model_problems
from services.cli.world_checks import index_problems, world_problems
from services.common.config.data import DatasetConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

_ASK_TIMEOUT_S = 30.0  # for another interpreter


def check_launch(recipe: Recipe) -> None:
    """Raises ``ConfigError`` with one line per problem: what is missing and how to get it."""
    problems = [*misfits(recipe), *model_problems(recipe), *index_problems(recipe), *launch_problems(recipe)]
    if problems:
        raise ConfigError(f"{recipe.name} cannot run:\n" + "\n".join(f"  {line}" for line in problems))


def launch_problems(recipe: Recipe) -> list[str]:
    """What this machine lacks to run a recipe that is valid, a line for each."""
    return [
        *missing_data(recipe),
        *gpu_problems(recipe, gpus_here()),
        *_missing_packages(recipe),
        *(world_problems(recipe) if recipe.envgateway and recipe.envgateway.node == 0 else ()),
    ]


def check_worlds(recipe: Recipe) -> None:
    """Raises ``ConfigError`` for a world that the gateway, which is about to start here, would miss at the first episode."""
    if problems := [*index_problems(recipe), *world_problems(recipe)]:
        raise ConfigError(f"the environment gateway of {recipe.name} cannot start:\n" + "\n".join(problems))


def missing_data(recipe: Recipe) -> list[str]:
    """Datasets known by name that are neither on this disk nor fetched by themselves."""
    from services.orchestrator.catalogue import must_be_fetched_by_hand

    problems = []
    for where, name in _named_datasets(recipe):
        if problem := must_be_fetched_by_hand(name, f"{where}.name"):
            problems.append(problem)
    return problems


def _named_datasets(recipe: Recipe) -> Iterator[tuple[str, str]]:
    sections: dict[str, DatasetConfig] = {"data.train": recipe.data.train}
    sections |= {f"data.evaluation.{name}": config for name, config in recipe.data.evaluation.items()}
    for where, config in sections.items():
        if config.name is not None:
            yield where, config.name


def _missing_packages(recipe: Recipe) -> list[str]:
    """Engines of this node whose package is not in the interpreter that would start them."""
    from services.inference.engine.sglang.environment import PYTHON, interpreter

    problems = []
    for name, service in recipe.inference.items():
        if service.engine != "sglang" or service.node != 0:
            continue
        try:
            python = interpreter(service.sglang.python)
        except ConfigError as error:
            problems.append(f"inference.{name}: {error.message}")
            continue
        if not _has_sglang(python):
            problems.append(
                f"inference.{name}.engine is sglang, but the package sglang is not installed for {python}: run this on a "
                f"GPU machine after `pip install 'millrace[sglang]'`, name the interpreter that has it with "
                f"inference.{name}.sglang.python or {PYTHON}, or try the recipe with --profile tiny"
            )
    return problems


def _has_sglang(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("sglang") is not None
    asked = [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"]
    try:
        return subprocess.run(asked, check=False, capture_output=True, timeout=_ASK_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
