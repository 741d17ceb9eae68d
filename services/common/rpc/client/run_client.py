"""Fetches the resolved recipe, for a process that knows only the orchestrator's address."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.aio import backoff, deadline
from services.common.config.reading.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import DeadlineError, InfrastructureError
from services.common.net.hosts import check_place
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.rpc.client.channel import DEADLINES, call_metadata, channel, translated_errors
from services.common.rpc.client.refusals import refusal_behind
from services.common.security.roles import Peer

log = structlog.get_logger()

FIRST_CONTACT_S = 120.0
AWAY_S = 600.0  # for an orchestrator that has answered before; then a replica or gateway ends, and a supervisor decides
FIRST_WORD_S = 3.0
TELL_S = 20.0  # between two words about an orchestrator that is waited for


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The facts of the run for a joining process."""

    run_id: str
    run_dir: Path  # on the orchestrator's machine
    recipe: Recipe


async def fetch_run(address: str, timeout_s: float = FIRST_CONTACT_S) -> RunSettings:
    """Fetch the run, waiting and reporting until the orchestrator is up; raises ``DeadlineError`` with address,
    obstacle and remedy, ``ConfigError`` at once for an invalid address, and ``AccessError`` at once for wrong keys."""
    check_place(address)
    obstacles: list[str] = []
    try:
        async with deadline(timeout_s, f"the first answer of the orchestrator at {address}"):
            response = await _ask(address, obstacles)
    except DeadlineError as error:
        last = f" ({obstacles[-1]})" if obstacles else ""
        raise DeadlineError(
            f"{error.message}{last}: is it running, and is the address right? "
            "(start it with `python -m services.orchestrator --run-dir DIR`)"
        ) from None
    recipe = validate(json.loads(response.config_json), source=f"the recipe of the orchestrator at {address}")
    return RunSettings(response.run_id, Path(response.run_dir), recipe)


async def _ask(address: str, obstacles: list[str]) -> run_pb2.GetRunResponse:
    """The newest of ``obstacles`` is the present one."""
    tell_at = 0.0
    async with channel(address, Peer.ORCHESTRATOR) as connection:
        stub = run_pb2_grpc.RunServiceStub(connection)
        for delay in backoff(0.2, 2.0):
            try:
                with translated_errors(f"orchestrator {address}"):
                    return await stub.GetRun(
                        run_pb2.GetRunRequest(), timeout=DEADLINES["GetRun"], metadata=call_metadata()
                    )
            except (InfrastructureError, DeadlineError) as error:
                obstacles[:] = [error.message]
                if (refused := await refusal_behind(error, connection)) is not None:
                    raise refused from None
                if time.monotonic() >= tell_at:
                    # The first word after a while: processes of one launch start together, and find each other within it.
                    if tell_at:
                        log.warning("orchestrator.waited_for", address=address, error=error.message)
                    tell_at = time.monotonic() + (TELL_S if tell_at else FIRST_WORD_S)
                await asyncio.sleep(delay)
    raise AssertionError("backoff never ends")
