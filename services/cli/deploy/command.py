"""Writes a deployment into a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from services.cli.deploy.compose import compose_files
from services.cli.deploy.kubernetes import kubernetes_files
from services.cli.deploy.layout import CHECKOUT, lay_out
from services.cli.deploy.metrics import dashboard, scrape_config
from services.cli.deploy.scripts import launch_scripts
from services.cli.deploy.sizes import check_gpu
from services.cli.deploy.skypilot import skypilot_files
from services.cli.deploy.slurm import slurm_files
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
    check_gpu(gpu)
    if gpu is not None and target in ("compose", "scripts"):
        raise ConfigError(f"--gpu asks a scheduler for a kind of GPU, and {target} has none: leave it out")
    if target in ("compose", "skypilot") and not IN_CHECKOUT:
        raise ConfigError(
            f"{target} takes files of a checkout: run `rollmill deploy` of one, or write --target scripts"
        )
    files = _files(recipe, target, output, overrides, profile, gpu)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        paths.append(output / name)
        paths[-1].write_text(text, encoding="utf-8")
        if name.endswith((".sh", ".sbatch")):
            paths[-1].chmod(0o755)
    return paths


def _files(
    recipe: Path, target: Target, output: Path, overrides: Sequence[str], profile: str | None, gpu: str | None
) -> dict[str, str]:
    if target == "kubernetes":  # has a layout of its own
        return kubernetes_files(recipe, overrides, profile, gpu)
    layout = lay_out(recipe, overrides, profile)
    if target == "slurm":
        place = output.resolve()
        below = place.is_relative_to(CHECKOUT)
        return slurm_files(layout, place.relative_to(CHECKOUT).as_posix() if below else str(place), gpu)
    if target == "skypilot":
        return skypilot_files(layout, gpu)
    if target == "scripts":
        return launch_scripts(layout)
    files = compose_files(layout, os.path.relpath(CHECKOUT, output.resolve()))
    if layout.metrics_ports and len(layout.nodes) == 1:
        files |= {"prometheus.yml": scrape_config(layout.run_id, layout.metrics_ports), "grafana.json": dashboard()}
    return files
