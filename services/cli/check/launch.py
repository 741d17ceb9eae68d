"""Checks that this machine can start a recipe: data, GPUs, packages, memory, worlds.

`rollmill run` refuses such a recipe before any process starts, instead of failing hours later. A recipe that passes
``check`` may still be refused on another machine than the run's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from services.cli.check.hub import hub_problems
from services.cli.check.memory.gpus import misfits
from services.cli.check.memory.host import embedded_estimates, host_problems, small_caches
from services.cli.check.model_files import model_problems
from services.cli.check.worlds import index_problems, mcp_problems, world_problems
from services.cli.plan.specs import plan
from services.common.config.processes.placement import gpu_claims
from services.common.config.processes.trackers import missing_packages
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import install, make_server_environment, missing
from services.common.system.devices import visible_gpus

_ASK_TIMEOUT_S = 60.0  # for another interpreter, which imports torch


def check_launch(recipe: Recipe) -> None:
    """Raise ``ConfigError`` with one line per problem: the missing part and the remedy."""
    refuse(recipe, [*problems_anywhere(recipe), *launch_problems(recipe)])


def refuse(recipe: Recipe, problems: Sequence[str]) -> None:
    """Raise ``ConfigError`` with the problems, if there are any."""
    if problems:
        lines = [line for problem in problems for line in problem.splitlines()]
        raise ConfigError(f"{recipe.name} cannot run:\n" + "\n".join(f"  {line.strip()}" for line in lines))


def problems_anywhere(recipe: Recipe) -> list[str]:
    """Problems that do not depend on what this machine has: memory, models, worlds, the hub's answers."""
    return [
        *misfits(recipe, embedded_estimates(recipe)),
        *small_caches(recipe),
        *model_problems(recipe),
        *index_problems(recipe),
        *(problem.text for problem in hub_problems(recipe) if not problem.of_machine),
    ]


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
    """Services of this node without their packages, and engines without one in the interpreter that starts them."""
    from services.inference.engine.served.environment import interpreter, python_variable, runs_on_cpu

    extras = {process.name.partition("-")[0] for process in plan(recipe, Path(), 0)}
    lacking = sorted({package for extra in extras for package in missing(extra)})
    problems = [f"its services need {', '.join(lacking)}, not installed here: {install('all')}"] if lacking else []
    for name, service in recipe.inference.items():
        if service.servers is None or service.node != 0:
            continue
        on_cpu = runs_on_cpu(service) and not service.gpus
        try:
            python = interpreter(service.engine, service.servers.python, on_cpu=on_cpu)
        except ConfigError as error:
            problems.append(f"inference.{name}: {error.message}")
            continue
        if why := _why_unusable(service.engine, python, on_cpu):
            problems.append(
                f"inference.{name}.engine is {service.engine}, but {why}: run "
                f"`{make_server_environment(service.engine, on_cpu=on_cpu)}`, name the interpreter that has it with "
                f"inference.{name}.{service.engine}.python or {python_variable(service.engine)}, or try the recipe with --profile tiny"
            )
    return problems


_ASK_PACKAGE = """
import importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None: sys.exit(f"the package {sys.argv[1]} is not installed for {sys.executable}")
import torch
if sys.argv[2] == "cuda" and torch.version.cuda is None: sys.exit(f"torch {torch.__version__} of {sys.executable} is built for CPUs")
"""


def _why_unusable(package: str, python: str, on_cpu: bool) -> str:
    """Why an interpreter cannot run an engine's servers, as far as an import of torch there tells; empty if it can."""
    command = [python, "-c", _ASK_PACKAGE, package, "cpu" if on_cpu else "cuda"]
    try:
        asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    last = asked.stderr.strip().splitlines()[-1:] or [f"{python} ends with {asked.returncode}"]
    return last[0] if asked.returncode else ""


_ASK = ("nvidia-smi", "--query-gpu=memory.total,uuid", "--format=csv,noheader,nounits")  # a line for each, in MiB
_TIMEOUT_S = 20.0
_TOLD_SHARE = 0.9  # of the memory in the recipe: drivers reserve some, and recipes say 80, not 79.6


def gpus_here() -> list[float]:
    """GiB of each GPU that CUDA_VISIBLE_DEVICES shows, in its order; empty where no NVIDIA driver answers."""
    try:
        answer = subprocess.run(_ASK, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[part.strip() for part in line.split(",")] for line in answer.stdout.split("\n")]
    found = [(float(line[0]) / 1024, line[-1]) for line in lines if line[0].isdecimal()]
    shown = visible_gpus(os.environ)
    if shown is None:
        return [memory for memory, _ in found]
    memories = []
    for name in shown:
        matching = [memory for place, (memory, uuid) in enumerate(found) if str(place) == name or uuid.startswith(name)]
        if not matching:  # a part of a GPU (MIG), whose memory this does not tell, or a name that is none
            break
        memories.append(matching[0])
    return memories


def gpu_problems(recipe: Recipe, memory_gib: Sequence[float]) -> list[str]:
    """One line for each section of node 0 whose GPUs are missing on this machine or have less memory than the recipe
    says."""
    problems = [] if memory_gib else _devices_without_a_gpu(recipe)
    for claim in gpu_claims(recipe.inference, recipe.policies):
        if claim.node != 0:
            continue
        if not memory_gib:
            problems.append(
                f"{claim.where} is {list(claim.gpus)}, but this machine has no NVIDIA GPU (`nvidia-smi -L` finds none): run "
                "this on a GPU machine, or try the recipe with --profile tiny"
            )
            continue
        missing = [gpu for gpu in claim.gpus if gpu >= len(memory_gib)]
        if missing:
            problems.append(
                f"{claim.where} names GPU {', '.join(map(str, missing))}, but this machine has the GPUs 0 to "
                f"{len(memory_gib) - 1}: write those (`nvidia-smi -L` lists them)"
            )
            continue
        smallest = min(claim.gpus, key=lambda gpu: memory_gib[gpu])
        if memory_gib[smallest] < _TOLD_SHARE * recipe.launch.gpu_memory_gib:
            problems.append(
                f"{claim.where}: GPU {smallest} has {memory_gib[smallest]:.1f} GiB, but the recipe counts with "
                f"{recipe.launch.gpu_memory_gib:g} (launch.gpu_memory_gib): write {int(memory_gib[smallest])} there, and "
                "`rollmill check` lists the processes that do not fit"
            )
    return problems


def smaller_cards(recipe: Recipe, memory_gib: Sequence[float]) -> Recipe | None:
    """The recipe with the memory of this machine's smallest GPU of node 0, to be estimated again; None if that is enough."""
    claimed = [
        memory_gib[gpu]
        for claim in gpu_claims(recipe.inference, recipe.policies)
        if claim.node == 0
        for gpu in claim.gpus
        if gpu < len(memory_gib)
    ]
    if not claimed or min(claimed) >= _TOLD_SHARE * recipe.launch.gpu_memory_gib:
        return None
    launch = recipe.launch.model_copy(update={"gpu_memory_gib": float(int(min(claimed)))})
    return recipe.model_copy(update={"launch": launch})


def _devices_without_a_gpu(recipe: Recipe) -> list[str]:
    """Sections of node 0 that say cuda and name no GPUs. ``gpu_problems`` reports sections that name GPUs."""
    sections = {
        f"inference.{name}.device": service.device
        for name, service in recipe.inference.items()
        if service.node == 0 and service.engine in ("torch", "forced") and not service.gpus
    }
    sections |= {
        f"policies.{name}.trainer.device": policy.trainer.device
        for name, policy in recipe.trained_policies.items()
        if recipe.run.steps and not policy.trainer.gpus
    }
    return [
        f"{where} is cuda, but this machine has no NVIDIA GPU (`nvidia-smi -L` finds none): write cpu or auto, or run this "
        "on a GPU machine"
        for where, device in sections.items()
        if device == "cuda"
    ]
