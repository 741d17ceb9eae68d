"""Connects a command to a run in progress: by the run's directory, which has address and keys, or by an address and
MILLRACE_KEYS."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from services.cli.inspect.run_state import check_run_directory, why_silent
from services.cli.inspect.standing import newest_run
from services.cli.keys.process_keys import keys_there, operate
from services.cli.plan.specs import orchestrator_address
from services.cli.watch.orchestrator_client import OrchestratorClient
from services.common.config.reading.loading import load_resolved
from services.common.errors import ConfigError, InfrastructureError
from services.common.net.hosts import ORCHESTRATOR, check_place
from services.common.pb import run_pb2
from services.common.security.bundle import VARIABLE

NAME_IT = "name the run's directory (runs/NAME), or another address with --orchestrator"


def chosen(run: Path | None, address: str | None) -> Path | None:
    """The run that a command is for: the one named, else the newest below `runs`, which stderr then names; None where an
    address is given, or there is no run and the default address counts."""
    if run is not None or address is not None or (newest := newest_run()) is None:
        return run
    typer.echo(f"run: {newest} (the newest)", err=True)
    return newest


def check_answers(client: OrchestratorClient, run: Path) -> run_pb2.GetRunResponse:
    """The state of ``run`` by its orchestrator.

    Raises:
        InfrastructureError: it does not answer, or another run has its port.
    """
    answer = client.get_run()
    if answer.run_id != load_resolved(run).run.id:
        raise InfrastructureError(f"at {client.address} another run answers ({answer.run_id}): {why_silent(run)}")
    return answer


def reach(run: Path | None, address: str | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys, if any; without ``run`` the one at ``address``.

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
