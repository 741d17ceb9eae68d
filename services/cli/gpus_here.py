"""The GPUs of this machine as its driver lists them, and what a recipe asks of GPUs that are not there."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from services.common.config.placement import gpu_claims
from services.common.config.recipe import Recipe

_ASK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")  # a line for each, in MiB
_TIMEOUT_S = 20.0
_TOLD_SHARE = 0.9  # of the memory that the recipe counts with: drivers keep some, and nobody writes 79.6


def gpus_here() -> list[float]:
    """GiB of each GPU; empty where no NVIDIA driver answers."""
    try:
        answer = subprocess.run(_ASK, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return [float(line) / 1024 for line in answer.stdout.split("\n") if line.strip().isdecimal()]


def gpu_problems(recipe: Recipe, memory_gib: Sequence[float]) -> list[str]:
    """A line for each section of node 0 whose GPUs this machine lacks, or whose memory the recipe overrates."""
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
                "`millrace check` says what does not fit"
            )
    return problems


def _devices_without_a_gpu(recipe: Recipe) -> list[str]:
    """Sections of node 0 that say cuda, and name no GPUs: those that do are told of them."""
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
