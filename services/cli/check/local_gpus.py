"""Compares the GPUs that the driver lists on this machine with the GPUs that a recipe asks for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from services.common.config.processes.placement import gpu_claims
from services.common.config.recipe import Recipe
from services.common.system.devices import visible_gpus

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
                "`millrace check` lists the processes that do not fit"
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
