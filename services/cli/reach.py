"""How a command reaches a run that goes on: by the run's directory, which knows address and keys, or by an address and MILLRACE_KEYS."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.launch_keys import keys_there, operate
from services.cli.orchestrator_client import OrchestratorClient
from services.cli.plan import orchestrator_address
from services.cli.run_state import check_run_directory, why_silent
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError
from services.common.hosts import ORCHESTRATOR, check_place
from services.common.security.bundle import VARIABLE

NAME_IT = "name the run's directory (runs/NAME), or another address with --orchestrator"


def reach(run: Path | None, address: str | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys where it has any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for both at once, no run directory or address, and for keys that cannot be used.
    """
    if run is None:
        place = address or ORCHESTRATOR
        check_place(place)
        given = os.environ.get(VARIABLE)
        operate(Path(given) if given else None)
        return OrchestratorClient(place, lambda: NAME_IT)
    if address is not None:
        raise ConfigError("name the run's directory or --orchestrator HOST:PORT, not both")
    check_run_directory(run)
    recipe = load_resolved(run)
    keys = keys_there(recipe, run)
    if keys is None and recipe.needs_keys:
        raise ConfigError(
            f"{run} does not have the keys of its run: set {VARIABLE} to the directory it was started with"
        )
    operate(keys)
    return OrchestratorClient(orchestrator_address(recipe), lambda: why_silent(run))
