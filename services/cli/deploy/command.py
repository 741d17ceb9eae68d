"""Writes a deployment into a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from services.cli.deploy.clusters import kubernetes_files, skypilot_files, slurm_files
from services.cli.deploy.compose import compose_files
from services.cli.deploy.layout import CHECKOUT, launch_scripts, lay_out
from services.common.errors import ConfigError
from services.common.installing import IN_CHECKOUT

Target = Literal["compose", "scripts", "slurm", "kubernetes", "skypilot"]


def deploy(
    recipe: Path,
    target: Target,
    output: Path,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    gpu: str | None = None,
) -> list[Path]:
    """Write the files of a target, scripts executable, and return their paths.

    ``gpu``: the kind of GPU that a scheduler is asked for.

    Raises:
        ConfigError: the recipe cannot run, or cannot be deployed this way.
    """
    if gpu is not None and not gpu.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--gpu {gpu!r} is no kind of GPU: write its name alone, such as H100; the recipe has the number"
        )
    if gpu is not None and target in ("compose", "scripts"):
        raise ConfigError(f"--gpu asks a scheduler for a kind of GPU, and {target} has none: leave it out")
    if target in ("compose", "skypilot") and not IN_CHECKOUT:
        raise ConfigError(
            f"{target} takes files of a checkout: run `rollmill deploy` of one, or write --target scripts"
        )
    place = output.resolve()
    if target == "kubernetes":  # has a layout of its own
        files = kubernetes_files(recipe, overrides, profile, gpu)
    else:
        layout = lay_out(recipe, overrides, profile)
        if target == "slurm":
            below = place.is_relative_to(CHECKOUT)
            files = slurm_files(layout, place.relative_to(CHECKOUT).as_posix() if below else str(place), gpu)
        elif target == "skypilot":
            files = skypilot_files(layout, gpu)
        elif target == "scripts":
            files = launch_scripts(layout)
        else:
            files = compose_files(layout, os.path.relpath(CHECKOUT, place))
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        paths.append(output / name)
        paths[-1].write_text(text, encoding="utf-8")
        if name.endswith((".sh", ".sbatch")):
            paths[-1].chmod(0o755)
    return paths
