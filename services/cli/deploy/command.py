"""Writes a deployment into a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from services.cli.deploy.compose import compose_files
from services.cli.deploy.layout import CHECKOUT, launch_scripts, lay_out
from services.common.errors import ConfigError
from services.common.extras import load_extra, provided
from services.common.installing import IN_CHECKOUT


def deploy(
    recipe: Path,
    target: str,
    output: Path,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    gpu: str | None = None,
) -> list[Path]:
    """Write the files of a target, scripts executable, and return their paths.

    ``target``: compose, scripts, or one of an extra. ``gpu``: the kind of GPU that a scheduler is asked for.

    Raises:
        ConfigError: the recipe cannot run, cannot be deployed this way, or no extra has the target.
    """
    if gpu is not None and not gpu.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--gpu {gpu!r} is no kind of GPU: write its name alone, such as H100; the recipe has the number"
        )
    place = output.resolve()
    if target in ("compose", "scripts"):
        if gpu is not None:
            raise ConfigError(f"--gpu asks a scheduler for a kind of GPU, and {target} has none: leave it out")
        if target == "compose" and not IN_CHECKOUT:
            raise ConfigError(
                "compose takes files of a checkout: run `rollmill deploy` of one, or write --target scripts"
            )
        layout = lay_out(recipe, overrides, profile)
        files = (
            compose_files(layout, os.path.relpath(CHECKOUT, place)) if target == "compose" else launch_scripts(layout)
        )
    elif target in provided("clusters"):
        files = load_extra("clusters", target)(recipe, overrides, profile, gpu, place)
    else:
        there = ", ".join(["compose", "scripts", *provided("clusters")])
        raise ConfigError(
            f"there is no target {target!r}: write one of {there} (slurm, kubernetes and skypilot are of extras/clusters)"
        )
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        paths.append(output / name)
        paths[-1].write_text(text, encoding="utf-8")
        if name.endswith((".sh", ".sbatch")):
            paths[-1].chmod(0o755)
    return paths
