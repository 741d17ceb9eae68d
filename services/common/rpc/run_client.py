"""Polls the status of a peer, so that a waiting component can report whether the peer is alive.

    ask GetStatus -> answered: its gauges and accounts   -> pause -> ask again
                  '-> not within the deadline: silent since the last answer

For dependencies that no other component watches: the gateway of a replica, the weight publisher of a trainer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import structlog

from services.common.aio import backoff, deadline
from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import DeadlineError, InfrastructureError, RollmillError, UserError
from services.common.net.hosts import check_place
from services.common.pb import run_pb2, run_pb2_grpc, status_pb2, status_pb2_grpc
from services.common.rpc.client import channel, refusal_behind, translated_errors
from services.common.security.identity import DEADLINES
from services.common.security.keys import Peer
from services.common.telemetry.accounts import AccountState, Component, PeerState
from services.common.wire import read

log = structlog.get_logger()
ASK_EVERY_S = 2.0
ANSWER_S = 3.0


class PeerWatch:
    """``run`` polls until cancelled; ``state`` is the newest known state, None before there is an address."""

    def __init__(
        self,
        component: Component,
        address: Callable[[], str],
        *,
        every_s: float = ASK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.component = component
        self._address = address
        self._every_s = every_s
        self._clock = clock
        self._state: PeerState | None = None
        self._silent_since: float | None = None

    def state(self) -> PeerState | None:
        known = self._state
        if known is None or self._silent_since is None:
            return known
        return replace(known, silent_s=self._clock() - self._silent_since)

    async def run(self) -> None:
        """Without a deadline: as long as its owner lives. Each question has one."""
        while True:
            if address := self._address():
                async with channel(address) as connection:
                    stub: status_pb2_grpc.StatusServiceAsyncStub = status_pb2_grpc.StatusServiceStub(connection)
                    while address == self._address():
                        await self._ask(address, stub)
                        await asyncio.sleep(self._every_s)
            await asyncio.sleep(self._every_s)

    async def _ask(self, address: str, stub: status_pb2_grpc.StatusServiceAsyncStub) -> None:
        asked = self._clock()
        try:
            with translated_errors(f"{self.component} {address}"):
                answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=ANSWER_S)
        except UserError as error:  # a refusal is an answer, too: the peer is alive
            log.warning("peer.refused", peer=self.component, address=address, error=error.message)
            answer = status_pb2.GetStatusResponse()
        except RollmillError as error:
            if self._silent_since is None:
                self._silent_since = asked
                log.warning("peer.silent", peer=self.component, address=address, error=error.message)
            known = self._state or PeerState(component=self.component, address=address)
            self._state = replace(known, address=address, detail=error.message)
            return
        except grpc.aio.UsageError:
            return  # the channel was closed under us: the process is leaving
        if self._silent_since is not None:
            log.info("peer.back", peer=self.component, silent_s=round(self._clock() - self._silent_since, 1))
        self._silent_since = None
        self._state = PeerState(
            component=self.component,
            address=address,
            gauges=dict(answer.gauges),
            accounts=tuple(read(AccountState, account) for account in answer.accounts),
        )


# --- Fetches the resolved recipe, for a process that knows only the orchestrator's address.


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
                    return await stub.GetRun(run_pb2.GetRunRequest(), timeout=DEADLINES["GetRun"])
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
