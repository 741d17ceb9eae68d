"""Checks that this machine can start a recipe: data, GPUs, packages, memory, worlds.

`millrace run` refuses such a recipe before any process starts, instead of failing hours later. A recipe that passes
``check`` may still be refused on another machine than the run's.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from services.cli.check.hub import hub_problems
from services.cli.check.local_gpus import gpu_problems, gpus_here, smaller_cards
from services.cli.check.mcp import mcp_problems
from services.cli.check.memory.gpus import misfits
from services.cli.check.memory.host import embedded_estimates, host_problems, small_caches
from services.cli.check.model_files import model_problems
from services.cli.check.worlds import index_problems, world_problems
from services.common.config.processes.trackers import missing_packages
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

_ASK_TIMEOUT_S = 30.0  # for another interpreter


def check_launch(recipe: Recipe) -> None:
    """Raise ``ConfigError`` with one line per problem: the missing part and the remedy."""
    problems = [
        *misfits(recipe, embedded_estimates(recipe)),
        *small_caches(recipe),
        *model_problems(recipe),
        *index_problems(recipe),
        *launch_problems(recipe),
    ]
    problems += [problem.text for problem in hub_problems(recipe) if not problem.of_machine]
    if problems:
        raise ConfigError(f"{recipe.name} cannot run:\n" + "\n".join(f"  {line}" for line in problems))


def launch_problems(recipe: Recipe) -> list[str]:
    """Problems of this machine with a valid recipe, one line each."""
    gpus = gpus_here()
    return [
        *missing_data(recipe),
        *gpu_problems(recipe, gpus),
        *(misfits(smaller, embedded_estimates(smaller)) if (smaller := smaller_cards(recipe, gpus)) else ()),
        *host_problems(recipe, has_gpus=bool(gpus)),
        *_missing_packages(recipe),
        *(problem.text for problem in hub_problems(recipe) if problem.of_machine),
        *missing_packages(recipe.run.trackers),
        *(
            [*world_problems(recipe), *mcp_problems(recipe)]
            if recipe.envgateway and recipe.envgateway.node == 0
            else ()
        ),
    ]


def check_worlds(recipe: Recipe) -> None:
    """Raises ``ConfigError`` for a world that the gateway, which is about to start here, would miss at the first episode."""
    if problems := [*index_problems(recipe), *world_problems(recipe)]:
        raise ConfigError(f"the environment gateway of {recipe.name} cannot start:\n" + "\n".join(problems))


def missing_data(recipe: Recipe) -> list[str]:
    """Datasets known by name that are neither on this disk nor fetched by themselves."""
    from services.orchestrator.tasks.catalogue import must_be_fetched_by_hand

    named = {where: config.name for where, config in recipe.data.sections().items() if config.name is not None}
    found = (must_be_fetched_by_hand(name, f"{where}.name") for where, name in named.items())
    return [problem for problem in found if problem]


def _missing_packages(recipe: Recipe) -> list[str]:
    """Engines of this node without an installed package in the interpreter that starts them."""
    from services.inference.engine.served.environment import interpreter, python_variable

    problems = []
    for name, service in recipe.inference.items():
        if service.servers is None or service.node != 0:
            continue
        try:
            python = interpreter(service.engine, service.servers.python)
        except ConfigError as error:
            problems.append(f"inference.{name}: {error.message}")
            continue
        if not _has_package(service.engine, python):
            problems.append(
                f"inference.{name}.engine is {service.engine}, but the package {service.engine} is not installed for {python}: run this on a "
                f"GPU machine after `pip install 'millrace[{service.engine}]'`, name the interpreter that has it with "
                f"inference.{name}.{service.engine}.python or {python_variable(service.engine)}, or try the recipe with --profile tiny"
            )
    return problems


def _has_package(package: str, python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    asked = [python, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"]
    try:
        return subprocess.run(asked, check=False, capture_output=True, timeout=_ASK_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
