"""How a command reaches a run that goes on: by an address and MILLRACE_KEYS, or by the run's directory, which knows both."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.launch_keys import keys_of, operate
from services.cli.orchestrator_client import OrchestratorClient
from services.cli.plan import orchestrator_address
from services.common.config.loading import load_resolved
from services.common.security.bundle import VARIABLE


def reach(address: str, run: Path | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys where it has any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for no run directory, and for keys that cannot be used.
    """
    if run is None:
        given = os.environ.get(VARIABLE)
        operate(Path(given) if given else None)
        return OrchestratorClient(address)
    recipe = load_resolved(run)
    operate(keys_of(recipe, run))
    return OrchestratorClient(orchestrator_address(recipe))
