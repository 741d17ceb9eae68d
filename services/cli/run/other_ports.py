"""Gives a run that goes on another port in place of a chosen one that another program has taken since its last launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console.plain import say
from services.cli.plan.nodes import other_nodes
from services.cli.plan.specs import taken_ports, with_free_ports
from services.common import run_files
from services.common.config.reading.loading import save_resolved
from services.common.config.recipe import Recipe

_PROC = Path("/proc")


def replaceable(recipe: Recipe, run_dir: Path) -> set[str]:
    """Settings with a port that the launch chose and may choose again: of a run on this machine alone, because processes of
    other nodes know its ports, and only when no process of an earlier launch is left that may hold them."""
    if other_nodes(recipe) or processes_left(run_dir):
        return set()
    return set(recipe.launch.chosen_ports)


def with_other_ports(recipe: Recipe, run_dir: Path, console: Console) -> Recipe:
    """The recipe with a free port for every replaceable one that is taken, saved in the run's directory.

    The caller holds the launcher's lock of the run.
    """
    candidates = replaceable(recipe, run_dir)
    taken = {where: port for where, port in taken_ports(recipe) if where in candidates}
    if not taken:
        return recipe
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    for where in taken:
        *keys, last = where.split(".")
        section: Any = tree
        for key in keys:
            section = section[key]
        section[last] = 0
    moved = with_free_ports(Recipe.model_validate(tree))
    save_resolved(moved, run_dir)
    now = dict(moved.ports())
    for where, port in taken.items():
        say(console, f"{where}: another program has taken port {port}; the run goes on with port {now[where]}")
    return moved


def processes_left(run_dir: Path) -> list[int]:
    """Processes that write their output into the run's logs: those of an earlier launch that have not ended."""
    logs = f"{run_files.logs(run_dir.resolve())}{os.sep}"
    found = []
    for entry in _PROC.glob("[0-9]*"):
        try:
            if os.readlink(entry / "fd" / "2").startswith(logs):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return sorted(found)
