"""How a command reaches a run that goes on: by an address and MILLRACE_KEYS, or by the run's directory, which knows both."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.orchestrator_client import OrchestratorClient
from services.cli.run_keys import act_as, keys_in_use
from services.common.config.loading import load_resolved
from services.common.security.bundle import VARIABLE
from services.common.security.roles import Role

PEOPLE = (Role.OPERATOR, Role.VIEWER)


def reach(address: str, run: Path | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys where it has any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for no run directory, and for keys that cannot be used.
    """
    if run is None:
        given = os.environ.get(VARIABLE)
        act_as(Path(given) if given else None, *PEOPLE)
        return OrchestratorClient(address)
    recipe = load_resolved(run)
    act_as(keys_in_use(recipe, run), *PEOPLE)
    return OrchestratorClient(f"{recipe.orchestrator.host}:{recipe.orchestrator.port}")
