"""How a command reaches a run that goes on: by an address and MILLRACE_KEYS, or by the run's directory, which knows both."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.launch_keys import keys_there, operate
from services.cli.orchestrator_client import OrchestratorClient
from services.cli.plan import orchestrator_address
from services.common.config.loading import load_resolved
from services.common.errors import ConfigError
from services.common.hosts import check_place
from services.common.security.bundle import VARIABLE


def reach(address: str, run: Path | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys where it has any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for no run directory or address, and for keys that cannot be used.
    """
    if run is None:
        check_place(address)
        given = os.environ.get(VARIABLE)
        operate(Path(given) if given else None)
        return OrchestratorClient(address)
    recipe = load_resolved(run)
    keys = keys_there(recipe, run)
    if keys is None and recipe.needs_keys:
        raise ConfigError(
            f"{run} does not have the keys of its run: set {VARIABLE} to the directory it was started with"
        )
    operate(keys)
    return OrchestratorClient(orchestrator_address(recipe))
