"""Opens the run of ``rollmill run``: a new one, or the one to go on with.

``--resume auto``, and ``run.resume: auto`` in the recipe, take the newest run in ``run.dir`` that has the recipe's name
and settings and has not ended; else a new one. A run keeps its first recipe, so a run with other settings is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.check.launch import check_launch, on_this_machine
from services.cli.check.recipe import check_named
from services.cli.console import say
from services.cli.inspect.run_state import ended
from services.cli.inspect.standing import newest_first
from services.cli.plan.profiles import load_with_profile
from services.cli.run.change import leaves, save_changes, with_changes
from services.cli.run.run_directory import prepare, reopen
from services.common.config.reading.loading import RESOLVED, load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.net.hosts import is_loopback
from services.common.telemetry.logs import without_passwords

AUTO = "auto"
_TOLD = 5  # runs that are left alone, in the line that says so
# Name, place and description of a run, and what its launch wrote: they do not change its behaviour.
_NO_SETTINGS = ("run.id", "run.dir", "run.resume", "description", "launch.chosen_ports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decision of a launch: continue with ``run_dir``, or begin a new run; ``told`` is the reason in one line."""

    run_dir: Path | None = None
    told: str = ""


def choose(recipe: Recipe, *, asked: bool) -> Choice:
    """``asked``: whether the command line says ``--resume auto``; else the recipe's ``run.resume`` counts."""
    if not asked and recipe.run.resume != AUTO:
        return Choice()
    why = "--resume auto" if asked else "run.resume: auto"
    runs = Path(recipe.run.dir)
    num_ended = 0
    skipped: list[str] = []
    for run_dir in newest_first(runs, lambda resolved: resolved.stat().st_mtime_ns, recipe.run.id or "*"):
        verdict = _verdict(recipe, run_dir)
        if verdict is None:
            continue  # of another recipe
        if state := ended(run_dir):
            num_ended += 1
            skipped += [f"{run_dir} is over ({state})"] if num_ended == 1 else []
        elif verdict:
            skipped.append(f"{run_dir} is left alone: {verdict}")
        else:
            return Choice(
                run_dir=run_dir,
                told=f"going on with {run_dir}, the newest run of {recipe.name} that has not ended ({why})",
            )
    more = [f"and {len(skipped) - _TOLD} more"] if len(skipped) > _TOLD else []
    reasons = "; ".join([*skipped[:_TOLD], *more]) or f"there is none in {runs}"
    return Choice(told=f"beginning a new run, for no run of {recipe.name} can go on ({why}): {reasons}")


def _verdict(recipe: Recipe, run_dir: Path) -> str | None:
    """Why the run in a directory cannot go on as one of this recipe; empty if possible, None for another recipe's."""
    try:
        found = load_resolved(run_dir)
    except ConfigError as error:  # as another version or a full disk may have left it
        why = " ".join(line.strip() for line in error.message.splitlines()[:2])
        return why if run_dir.name.startswith(recipe.name) else None
    if found.name != recipe.name:
        return None
    if found.run.id != run_dir.name:
        return f"its {RESOLVED} is that of run {found.run.id}"
    if not os.access(run_dir, os.W_OK | os.X_OK):
        return "it cannot be written"
    different = differences(found, recipe)
    if not different:
        return ""
    more = f", and {len(different) - 1} more" if len(different) > 1 else ""
    return f"{different[0]}{more}"


def differences(found: Recipe, wanted: Recipe) -> list[str]:
    """Settings of a run that differ from a recipe, in words. Settings that a launch fills in (free ports, addresses) do
    not count."""
    # Without passwords: the text goes to terminals and logs.
    there, here = (dict(leaves(without_passwords(each.model_dump(mode="json")))) for each in (found, wanted))
    return [
        f"{path} is {there.get(path)!r} there and {here.get(path)!r} here"
        for path in sorted(there.keys() | here.keys())
        if path not in _NO_SETTINGS and there.get(path) != here.get(path) and not _is_filled_in(path, here.get(path))
    ]


def _is_filled_in(path: str, wanted: Any) -> bool:
    key = path.rpartition(".")[2]
    return (key.endswith("port") and wanted == 0) or (key == "host" and isinstance(wanted, str) and is_loopback(wanted))


def opened(
    recipe: Path | None, resume: str | None, overrides: Sequence[str], profile: str | None, console: Console
) -> tuple[Recipe, Path]:
    """The resolved recipe and the directory of a new run, or of the one to go on with, checked either way.

    Raises:
        ConfigError: neither or both are named, the recipe cannot run, or the run cannot go on so.
    """
    if (recipe is None) != (resume not in (None, AUTO)):
        raise ConfigError(
            "name a recipe to start a run (with --resume auto to go on with its newest one that has not ended), or --resume RUN "
            "to go on with one; not both"
        )
    if recipe is None:
        if profile:
            raise ConfigError("a run that goes on keeps its profile: leave out --profile, or start another run")
        resolved, run_dir = reopen(Path(str(resume)), console)
        if overrides:
            resolved, changes = with_changes(resolved, run_dir, overrides)
            check_launch(resolved)
            check_named(resolved)
            save_changes(resolved, run_dir, changes)
            for setting, (former, new) in changes.items():
                say(console, f"{setting}: {former} -> {new}")
        return resolved, run_dir
    loaded = on_this_machine(load_with_profile(recipe, overrides, profile))
    choice = choose(loaded, asked=resume == AUTO)
    if choice.told:
        say(console, choice.told)
    if choice.run_dir is not None:
        return reopen(choice.run_dir, console)
    check_launch(loaded)
    check_named(loaded)
    return prepare(loaded)
