"""The command ``rollmill deploy``. What it takes is imported when the command is called, so that ``--help`` answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.cli.console import ProfileOption, RecipeArgument, SetOption, console, say


def deploy(
    recipe: RecipeArgument,
    target: Annotated[
        str,
        typer.Option(
            help="`compose`: containers, a file for each node. `scripts`: processes, a script for each. `slurm`: scripts and a "
            "job for sbatch. `kubernetes`: manifests for kubectl. `skypilot`: a task for sky."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write to.")],
    set_: SetOption = None,
    profile: ProfileOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="The kind of GPU, as the target names it: with slurm, kubernetes and skypilot, which need it for a recipe with GPUs.",
        ),
    ] = None,
) -> None:
    """Write the files of a deployment from the resolved recipe (docs/deploy.md)."""
    for path in write_deployment(recipe, target, output, set_ or (), profile, gpu):
        say(console, str(path))


def write_deployment(
    recipe: Path,
    target: str,
    output: Path,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    gpu: str | None = None,
) -> list[Path]:
    """Write the files of a target, scripts executable, and return their paths.

    ``gpu``: the kind of GPU that a scheduler is asked for.

    Raises:
        ConfigError: the recipe cannot run or cannot be deployed this way, or there is no such target.
    """
    from extras.deploy.clusters import kubernetes_files, skypilot_files, slurm_files
    from extras.deploy.files import compose_files, launch_scripts, lay_out
    from services.common.errors import ConfigError

    targets = {
        "compose": compose_files,
        "scripts": launch_scripts,
        "slurm": slurm_files,
        "kubernetes": kubernetes_files,
        "skypilot": skypilot_files,
    }
    if target not in targets:
        raise ConfigError(f"there is no target {target!r}: write one of {', '.join(targets)}")
    if gpu is not None and not gpu.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--gpu {gpu!r} is no kind of GPU: write its name alone, such as H100; the recipe has the number"
        )
    if gpu is not None and target in ("compose", "scripts"):
        raise ConfigError(f"--gpu asks a scheduler for a kind of GPU, and {target} has none: leave it out")
    files = targets[target](lay_out(recipe, overrides, profile, gpu), output.resolve())
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        paths.append(output / name)
        paths[-1].write_text(text, encoding="utf-8")
        if name.endswith((".sh", ".sbatch")):
            paths[-1].chmod(0o755)
    return paths
