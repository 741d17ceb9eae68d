"""The keys of a run over several nodes: made once beside the run, one role for each process, and what other nodes get.

    RUN/keys/ROLE       what a process of node 0 gets (MILLRACE_KEYS); made by whoever comes first
    RUN/nodes/N         the bundle of node N: the resolved recipe, starting checkpoints and the keys of its processes' role;
                        neither the authority nor an operator

A run on one node stays on loopback without keys, unless ``MILLRACE_KEYS`` names some.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console

from services.cli.nodes import BUNDLES, HOST_VARIABLE, other_nodes
from services.cli.plan import ProcessSpec
from services.common.config.loading import save_resolved
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.errors import ConfigError, DeadlineError
from services.common.security import bundle as files
from services.common.security import identity
from services.common.security.bundle import VARIABLE
from services.common.security.roles import Role

KEYS = "keys"
RENEW_BEFORE_S = 7 * 86400.0
KEYS_WAIT_S = 3600.0
_POLL_S = 0.2


def keys_of_run(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The directory of the run's keys, made when other nodes need some; None for a run without.

    Renewed when they end within a week and were made here; running processes notice. Also writes the bundles of the other nodes.

    Raises ``ConfigError`` for keys that cannot be used.
    """
    named = environment.get(VARIABLE, "")
    folder = Path(named).resolve() if named else run_dir / KEYS
    if not named and not folder.exists():
        if not other_nodes(recipe):
            return None
        _make_once(folder, str(recipe.run.id))
    elif not named:
        _renew_in_time(folder)
    for node in other_nodes(recipe):
        _write_bundle(recipe, run_dir, folder, run_dir / BUNDLES / str(node))
    return folder


def keys_of_process(
    recipe: Recipe,
    process: str,
    node: int,
    run_dir: Path,
    console: Console,
    environment: Mapping[str, str] = os.environ,
) -> Path | None:
    """The keys with which one process is started by itself: those that MILLRACE_KEYS names, else those of the run here,
    waited for when the orchestrator has not made them yet. None for a run without.

    Raises:
        ConfigError: the process needs keys that only node 0 has.
        DeadlineError: nobody made them.
    """
    if named := environment.get(VARIABLE, ""):
        return Path(named).resolve()
    folder = run_dir / KEYS
    if folder.exists():
        return folder
    if not other_nodes(recipe):
        return None
    if node != 0:
        raise ConfigError(
            f"{process} runs on node {node} and needs the keys of the run: copy its bundle from node 0 and set {VARIABLE} to "
            "the keys in it (`millrace run`, or the start of the orchestrator, prints both commands)"
        )
    console.print(f"waiting for the orchestrator to make the keys in {folder}", highlight=False, soft_wrap=True)
    deadline = time.monotonic() + KEYS_WAIT_S
    while not folder.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"nobody made the keys of the run in {folder} within {KEYS_WAIT_S:g} s: start the orchestrator with the same "
                f"RUN_DIR; on a machine that does not see it, set {HOST_VARIABLE} and {VARIABLE}"
            )
        time.sleep(_POLL_S)
    return folder


def role_of(process: str) -> Role:
    """The role of a process by its name in the plan."""
    return Role(process.partition("-")[0])


def with_keys(specs: Iterable[ProcessSpec], keys: Path | None) -> list[ProcessSpec]:
    """The same processes, each with the keys of its role and no others."""
    if keys is None:
        return list(specs)
    found = {spec.name: files.find(keys, [role_of(spec.name)]) for spec in specs}
    return [dataclasses.replace(spec, env={**spec.env, VARIABLE: str(found[spec.name])}) for spec in specs]


def act_as(keys: Path | None, *roles: Role) -> None:
    """From now on this process calls others as the first of these roles whose keys are there; without keys in plain."""
    identity.configure(*roles, environment={VARIABLE: str(keys)} if keys is not None else {})


def _make_once(folder: Path, run: str) -> None:
    """Whole or not at all: processes of a split launch may come at once, and the first one's keys count."""
    from services.cli.keyring import Keyring

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 700
    try:
        Keyring.make(partial, run)
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there when it was renamed


def _renew_in_time(folder: Path) -> None:
    from services.cli.keyring import Keyring

    keyring = Keyring(folder)
    ends_at = min((min(e.certificate_ends_at, e.token_ends_at) for e in keyring.entries()), default=0.0)
    if ends_at - time.time() < RENEW_BEFORE_S:
        keyring.renew()


def _write_bundle(recipe: Recipe, run_dir: Path, keys: Path, bundle: Path) -> None:
    """Inference services are all that other nodes run: the keys of that role, the settings, what the warm start makes."""
    for folder in (bundle.parent, bundle):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_resolved(recipe, bundle)
    source = files.find(keys, [Role.INFERENCE])
    files.save(bundle / KEYS / Role.INFERENCE.value, files.load(source))
    for policy in recipe.warm_start:
        link = warm_start_dir(bundle, policy)
        if not link.is_symlink():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(
                os.path.relpath(warm_start_dir(run_dir, policy), link.parent)
            )  # filled by the time it is copied
