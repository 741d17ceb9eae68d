"""Bundles of a run for other nodes, and the keys of a process that is started alone.

RUN/nodes/N         the bundle of node N: the resolved recipe, starting checkpoints, and the keys of its processes' role;
                    neither the authority nor an operator
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console

from services.cli.console.plain import say
from services.cli.keys.process_keys import KEYS, role_of
from services.cli.plan.nodes import BUNDLES, HOST_VARIABLE, other_nodes
from services.cli.plan.specs import plan
from services.common.config.reading.loading import save_resolved
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.errors import ConfigError, DeadlineError
from services.common.security import bundle as files
from services.common.security.bundle import VARIABLE
from services.common.security.roles import Role

KEYS_WAIT_S = 3600.0
_POLL_S = 0.2


def write_bundles(recipe: Recipe, run_dir: Path, keys: Path) -> None:
    """Write, or renew, the bundle of every other node. Writes none if only the keys of some roles are here: then the
    owner of the authority distributes them. Raises ``ConfigError`` for keys that cannot be used."""
    for node in other_nodes(recipe):
        roles = {role_of(spec.name) for spec in plan(recipe, run_dir, node)}
        if all(files.is_there(keys / role.value) for role in roles):
            _write(recipe, run_dir, keys, roles, run_dir / BUNDLES / str(node))


def keys_of_process(
    recipe: Recipe,
    process: str,
    node: int,
    run_dir: Path,
    console: Console,
    environment: Mapping[str, str] = os.environ,
) -> Path | None:
    """The keys of one process that is started alone: those that MILLRACE_KEYS names, else those of the run, after
    waiting until the orchestrator has made them. None for a run without keys.

    Raises:
        ConfigError: the process needs keys that only node 0 has.
        DeadlineError: the orchestrator has not made them in time.
    """
    if recipe.security.tls == "off":
        return None
    if named := environment.get(VARIABLE, ""):
        return Path(named).resolve()
    folder = run_dir / KEYS
    if files.is_there(folder):
        return folder
    if not other_nodes(recipe) and not recipe.needs_keys:
        return None
    if node != 0:
        raise ConfigError(
            f"{process} runs on node {node} and needs the keys of the run: copy its bundle from node 0 and set {VARIABLE} to "
            "the keys in it (`millrace run`, or the start of the orchestrator, prints both commands)"
        )
    say(console, f"waiting for the orchestrator to make the keys in {folder}")
    deadline = time.monotonic() + KEYS_WAIT_S
    while not files.is_there(folder):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the keys of the run were not made in {folder} within {KEYS_WAIT_S:g} s: start the orchestrator with the same "
                f"RUN_DIR; on a machine that does not see it, set {HOST_VARIABLE} and {VARIABLE}"
            )
        time.sleep(_POLL_S)
    return folder


def _write(recipe: Recipe, run_dir: Path, keys: Path, roles: Collection[Role], bundle: Path) -> None:
    """Write the keys of that node's processes (inference services, shares of trainers), the settings, and the starting
    checkpoints."""
    for folder in (bundle.parent, bundle):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_resolved(recipe, bundle)
    for role in roles:
        source, target = files.find(keys, [role]), bundle / KEYS / role.value
        files.save(target, files.load(source))
        if role is Role.INFERENCE and (source / Role.AGENT.value).is_dir():  # for the agents that a replica starts
            files.save(target / Role.AGENT.value, files.load(source / Role.AGENT.value))
    for policy in recipe.warm_start:
        link = warm_start_dir(bundle, policy)
        if not link.is_symlink():
            link.parent.mkdir(exist_ok=True)
            # Filled by the time it is copied. Relative: the copying host may mount the run under another path.
            link.symlink_to(os.path.relpath(warm_start_dir(run_dir, policy), link.parent))
