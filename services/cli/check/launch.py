"""Checks that this machine can start a recipe: data, GPUs, packages, memory, worlds.

`rollmill run` refuses such a recipe before any process starts, instead of failing hours later. A recipe that passes
``check`` may still be refused on another machine than the run's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.check.hub import hub_problems
from services.cli.check.memory import host_problems, misfits, small_caches
from services.cli.check.model_files import model_problems
from services.cli.check.worlds import index_problems, mcp_problems, sandbox_problems, world_problems
from services.cli.plan.specs import plan
from services.common.config.processes.placement import Placement, check_placement, gpu_claims
from services.common.config.processes.services import ENGINES, InferenceConfig
from services.common.config.processes.trackers import missing_packages
from services.common.config.recipe import Recipe
from services.common.config.training.policy import TrainerConfig
from services.common.errors import ConfigError
from services.common.installing import install, make_server_environment, missing
from services.common.system.devices import has_gpu_driver, visible_gpus

_ASK_TIMEOUT_S = 120.0  # for another interpreter, to import torch and initialise a GPU
_OTHER_FILES = 512  # open files of a replica beside one connection for each slot


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe as node 0 runs it here: devices, types and placement that are `auto`, and the memory of the GPU that sections
    take which name none."""
    gpus = gpus_here()
    # Else each process looks for itself.
    if _may_have_others(gpus):
        return recipe
    found = recipe.with_devices(has_gpu=bool(gpus), node=0)
    sections = _computing(found).values()
    unnamed = [section for section in sections if section.device == "cuda" and not section.gpus]
    placement, launch = found.placement, found.launch
    if placement is Placement.AUTO:
        placement = Placement.APART
        if len(gpus) == 1 and len(unnamed) == len(sections) and len({type(section) for section in unnamed}) == 2:
            with contextlib.suppress(ValueError):  # engines that do not free their memory, processes of other nodes
                check_placement(found.inference, found.policies, Placement.SHARED)
                placement = Placement.SHARED
    if gpus and unnamed:
        written = [launch.gpu_memory_gib] if "gpu_memory_gib" in recipe.launch.model_fields_set else []
        taken = gpus[: max(section.num_ranks if isinstance(section, TrainerConfig) else 1 for section in unnamed)]
        launch = launch.model_copy(update={"gpu_memory_gib": min([float(int(min(taken))), *written])})
    return found.model_copy(update={"placement": placement, "launch": launch})


def _may_have_others(gpus: Sequence[float]) -> bool:
    """Whether there may be GPUs that `nvidia-smi` does not tell: a part of one, or no such program."""
    return not gpus and has_gpu_driver() and visible_gpus(os.environ) != []


def _computing(recipe: Recipe) -> dict[str, InferenceConfig | TrainerConfig]:
    """The sections of node 0 that compute with a model, by their keys."""
    found: dict[str, InferenceConfig | TrainerConfig] = {}
    for name, service in recipe.inference.items():
        if service.node == 0 and service.engine != "scripted":
            found[f"inference.{name}"] = service
    for name, policy in recipe.trained_policies.items() if recipe.run.steps else ():
        found[f"policies.{name}.trainer"] = policy.trainer
    return found


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
        *misfits(recipe),
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
        *(misfits(smaller) if (smaller := smaller_cards(recipe, gpus)) else ()),
        *host_problems(recipe, has_gpus=bool(gpus) or _may_have_others(gpus)),
        *_file_problems(recipe),
        *_disk_problems(recipe),
        *_interpreter_problems(recipe, has_gpus=bool(gpus)),
        *(problem.text for problem in hub_problems(recipe) if problem.of_machine),
        *missing_packages(recipe.run.trackers),
        *(
            [*world_problems(recipe), *sandbox_problems(recipe), *mcp_problems(recipe)]
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


def _interpreter_problems(recipe: Recipe, *, has_gpus: bool) -> list[str]:
    """Services of this node without their packages, and sections whose interpreter lacks the engine's package or has a PyTorch
    that cannot use the GPU there is."""
    from services.inference.engine.served.environment import interpreter, python_variable, runs_on_cpu

    extras = {process.name.partition("-")[0] for process in plan(recipe, Path(), 0)}
    lacking = sorted({package for extra in extras for package in missing(extra)})
    problems = [f"its services need {', '.join(lacking)}, not installed here: {install('all')}"] if lacking else []
    for where, section in _computing(recipe).items():
        python, engine = sys.executable, section.engine if isinstance(section, InferenceConfig) else "torch"
        if isinstance(section, InferenceConfig) and section.servers is not None:
            on_cpu = runs_on_cpu(section)
            try:
                python = interpreter(engine, section.servers.python, on_cpu=on_cpu)
            except ConfigError as error:
                problems.append(f"{where}: {error.message}")
                continue
            if why := _error_of(python, _IMPORT.format(engine=engine, on_cpu=on_cpu)):
                problems.append(
                    f"{where}.engine is {engine}, but {why}: run `{make_server_environment(engine, on_cpu=on_cpu)}`, name the "
                    f"interpreter that has it with {where}.{engine}.python or {python_variable(engine)}, or try the recipe with "
                    "--profile tiny"
                )
                continue
        asks_torch = has_gpus and section.device == "cuda" and engine in ENGINES
        if asks_torch and (why := _error_of(python, "import torch; torch.cuda.init()")):
            problems.append(
                f"{where}.device is cuda, but the PyTorch of {python} cannot use the GPU ({why}): install a CUDA build that the "
                "driver supports (`nvidia-smi` shows its CUDA version), or leave gpus out and write device: cpu"
            )
    return problems


# An engine's own import takes many seconds; an install that did not end shows in the import of torch.
_IMPORT = """
import importlib.util, sys
importlib.util.find_spec("{engine}") or sys.exit(f"the package {engine} is not installed for {{sys.executable}}")
import torch
{on_cpu} or torch.version.cuda or sys.exit(f"torch {{torch.__version__}} of {{sys.executable}} is built for CPUs")
"""


@functools.cache
def _error_of(python: str, code: str) -> str:
    """The last line of the error with which code of another interpreter ends; empty when it ends well."""
    asked = [python, "-c", code]
    try:
        answer = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1] if answer.returncode else ""


def _file_problems(recipe: Recipe) -> list[str]:
    """One line for each service of node 0 with more connections than its process may open files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [
        f"inference.{name}.num_slots is {service.num_slots}, each of which has a connection, and a process may open {most} files "
        f"here (`ulimit -Hn`): raise the hard limit to {2 * service.num_slots + _OTHER_FILES} (limits.conf, LimitNOFILE, --ulimit "
        f"nofile), or write at most {max(1, most - _OTHER_FILES)} slots"
        for name, service in recipe.inference.items()
        if service.node == 0 and service.servers and 0 <= most < service.num_slots + _OTHER_FILES  # -1: no limit
    ]


def _disk_problems(recipe: Recipe) -> list[str]:
    """A line where the disk of the runs has less free than a run needs to issue tasks."""
    place, least = Path(recipe.run.dir).absolute(), recipe.orchestrator.min_free_bytes
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    told = f"run.dir {recipe.run.dir}: its disk has {free} bytes free, and below orchestrator.min_free_bytes ({least}) no task is issued"
    return [f"{told}: free some, name another disk, or lower it"] if free < least else []


_ASK = ("nvidia-smi", "--query-gpu=memory.total,uuid", "--format=csv,noheader,nounits")  # a line for each, in MiB
_TIMEOUT_S = 20.0
_TOLD_SHARE = 0.9  # of the memory in the recipe: drivers reserve some, and recipes say 80, not 79.6


def gpus_here() -> list[float]:
    """GiB of each GPU that CUDA_VISIBLE_DEVICES shows, in its order; empty where no NVIDIA driver answers."""
    try:
        answer = subprocess.run(_ASK, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
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
    if _may_have_others(memory_gib):
        return []
    if not memory_gib:
        lacking = {where: section for where, section in _computing(recipe).items() if section.device == "cuda"}
        return [
            f"{where}.{f'gpus is {section.gpus}' if section.gpus else 'device is cuda'}, but this machine has no NVIDIA GPU "
            "(`nvidia-smi -L` finds none): run this on a GPU machine, "
            f"{'or try the recipe with --profile tiny' if section.gpus else 'or write cpu or auto'}"
            for where, section in lacking.items()
        ]
    problems = []
    for claim in gpu_claims(recipe.inference, recipe.policies):
        if claim.node != 0:
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
    claims = [claim for claim in gpu_claims(recipe.inference, recipe.policies) if claim.node == 0]
    claimed = [memory_gib[gpu] for claim in claims for gpu in claim.gpus if gpu < len(memory_gib)]
    if not claimed or min(claimed) >= _TOLD_SHARE * recipe.launch.gpu_memory_gib:
        return None
    launch = recipe.launch.model_copy(update={"gpu_memory_gib": float(int(min(claimed)))})
    return recipe.model_copy(update={"launch": launch})
