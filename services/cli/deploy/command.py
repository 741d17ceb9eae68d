"""Writes a deployment into a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from services.cli.deploy.compose import compose_files
from services.cli.deploy.layout import CHECKOUT, lay_out
from services.cli.deploy.metrics import dashboard, scrape_config
from services.cli.deploy.scripts import launch_scripts

Target = Literal["compose", "scripts"]


def deploy(
    recipe: Path, target: Target, output: Path, overrides: Sequence[str] = (), profile: str | None = None
) -> list[Path]:
    """Write the files of a target, scripts executable, and return their paths.

    Raises:
        ConfigError: the recipe cannot run, or cannot be deployed this way.
    """
    layout = lay_out(recipe, overrides, profile)
    if target == "compose":
        files = compose_files(layout, os.path.relpath(CHECKOUT, output.resolve()))
        if layout.metrics_ports and len(layout.nodes) == 1:
            files |= {"prometheus.yml": scrape_config(layout.run_id, layout.metrics_ports), "grafana.json": dashboard()}
    else:
        files = launch_scripts(layout)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        paths.append(output / name)
        paths[-1].write_text(text)
        if name.endswith(".sh"):
            paths[-1].chmod(0o755)
    return paths
