"""Claims a directory for a new run and writes its resolved recipe, or opens the directory of a run to resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console import say
from services.cli.inspect.run_state import check_can_go_on, launcher_lock, processes_left
from services.cli.keys.process_keys import operate
from services.cli.plan.nodes import other_nodes, with_addresses
from services.cli.plan.specs import ports_in_use, taken_ports, with_free_ports
from services.common.config.reading.loading import RESOLVED, load_resolved, save_resolved, set_at, with_run_id
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.security.bundle import VARIABLE
from services.orchestrator.config import Settings
from services.orchestrator.lock import RunLock


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
        set_at(tree, where.split("."), 0)
    moved = with_free_ports(Recipe.model_validate(tree))
    save_resolved(moved, run_dir)
    now = dict(moved.ports())
    for where, port in taken.items():
        say(console, f"{where}: another program has taken port {port}; the run goes on with port {now[where]}")
    return moved


RELEASE_S = 5.0  # beyond launch.stop_grace_s: for the processes of a launch that is ending
_LOOK_S = 0.2
_NAMES = 100  # tried for a run that has none


def prepare(recipe: Recipe) -> tuple[Recipe, Path]:
    """Choose id, addresses, ports and directory of a new run and save the resolved recipe there.

    A run without a name gets another one if a second run starts in the same second.

    Raises ``ConfigError`` when the directory exists already or cannot be written, a port is taken, the keys of
    ``ROLLMILL_KEYS`` cannot be used, or other nodes could not reach this one.
    """
    wanted = recipe
    recipe = with_run_id(wanted)
    recipe = with_free_ports(with_addresses(recipe))
    if taken := ports_in_use(recipe):
        raise ConfigError("\n".join(taken))
    if recipe.security.tls != "off" and (given := os.environ.get(VARIABLE)):
        operate(Path(given))  # before a directory is there that would be in the way of the next try
    run_dir = _claim(recipe)
    for number in range(2, _NAMES):
        if run_dir is not None or wanted.run.id:
            break
        name = f"{with_run_id(wanted).run.id}-{number}"
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": name})})
        run_dir = _claim(recipe)
    if run_dir is None:
        run_dir = _directory(recipe)
        raise ConfigError(
            f"{run_dir} holds a run already: choose another name with --set run.id=NAME, "
            f"or go on with it: rollmill run --resume {run_dir}"
        )
    return recipe, run_dir


def _directory(recipe: Recipe) -> Path:
    return (Path(recipe.run.dir) / str(recipe.run.id)).resolve()


def _claim(recipe: Recipe) -> Path | None:
    """The run's directory, with the resolved recipe; None when there is one already.

    Of two concurrent callers, one gets the directory.
    """
    run_dir = _directory(recipe)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RESOLVED).touch(exist_ok=False)
        try:
            save_resolved(recipe, run_dir)
        except OSError:
            (run_dir / RESOLVED).unlink()  # or the next try would find a run that is none
            raise
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be written ({error.strerror}): free some space or correct its permissions, or name another directory with "
            "--set run.dir=DIRECTORY"
        ) from None
    return run_dir


def reopen(run_dir: Path, console: Console | None = None, wait_s: float | None = None) -> tuple[Recipe, Path]:
    """The resolved recipe of a run that is to continue.

    Waits for processes of the previous launch that are still ending: ``launch.stop_grace_s`` and ``RELEASE_S`` unless
    ``wait_s`` says otherwise, because a launcher gives them as long.

    Raises ``ConfigError`` for a run that has ended, or whose launcher, orchestrator or ports are still active.
    """
    recipe = load_resolved(run_dir)
    check_can_go_on(run_dir)
    limit_s = recipe.launch.stop_grace_s + RELEASE_S if wait_s is None else wait_s
    deadline = time.monotonic() + limit_s
    told = False
    while held := _held(recipe, run_dir):
        if time.monotonic() >= deadline:
            raise ConfigError(
                "\n".join(
                    [
                        *held,
                        f"is the run still going? (rollmill watch {run_dir}) Else stop the processes that hold its directory and ports",
                    ]
                )
            )
        if console is not None and not told:
            say(console, f"waiting up to {limit_s:.0f} s for the launch before to end: {'; '.join(held)}")
            told = True
        time.sleep(_LOOK_S)
    check_can_go_on(run_dir)  # it may have ended meanwhile
    return recipe, run_dir.resolve()


def _held(recipe: Recipe, run_dir: Path) -> list[str]:
    """Resources that an earlier launch of a run still holds, one line each."""
    # The orchestrator's is not touched while a launcher may be starting one: a look holds the lock for an instant.
    holder = launcher_lock(run_dir).held_by() or RunLock(Settings(run_dir).lock_file).held_by()
    held = [f"{run_dir} is in use ({holder})"] if holder else []
    replaced = replaceable(recipe, run_dir)
    # It keeps the others, so other ones are no advice.
    return held + [f"{where}: port {port} is in use" for where, port in taken_ports(recipe) if where not in replaced]
