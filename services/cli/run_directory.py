"""A run's directory: claimed for a new run with its resolved recipe in it, or opened to go on with."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.launch_keys import operate
from services.cli.nodes import with_addresses
from services.cli.plan import ports_in_use, with_free_ports
from services.cli.run_state import check_can_go_on
from services.common.config.loading import RESOLVED, load_resolved, save_resolved, with_run_id
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.security.bundle import VARIABLE

_NAMES = 100  # tried for a run that has none


def prepare(recipe: Recipe) -> tuple[Recipe, Path]:
    """Resolve id, addresses, ports and directory of a new run and save the resolved recipe there.

    A run without a name gets another one when somebody else starts a run in the same second.

    Raises ``ConfigError`` when the directory exists already or cannot be written, a port is taken, the keys of
    ``MILLRACE_KEYS`` cannot be used, or other nodes could not reach this one.
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
            f"or go on with it: millrace run --resume {run_dir}"
        )
    return recipe, run_dir


def _directory(recipe: Recipe) -> Path:
    return (Path(recipe.run.dir) / str(recipe.run.id)).resolve()


def _claim(recipe: Recipe) -> Path | None:
    """The run's directory with the resolved recipe in it; None when there is one already.

    Of two that come at once, one gets it.
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
            f"{run_dir} cannot be written ({error.strerror}): make room or mend its rights, or name another place with "
            "--set run.dir=DIRECTORY"
        ) from None
    return run_dir


def reopen(run_dir: Path) -> tuple[Recipe, Path]:
    """The resolved recipe of a run that is to go on. Raises ``ConfigError`` for one that is over, or whose ports are held."""
    recipe = load_resolved(run_dir)
    check_can_go_on(run_dir)
    if taken := ports_in_use(recipe):
        held = [line.partition(";")[0] for line in taken]  # it keeps its ports, so other ones are no advice
        raise ConfigError(
            "\n".join([*held, f"is the run still going? (millrace watch {run_dir}) Else stop what holds its ports"])
        )
    return recipe, run_dir.resolve()
