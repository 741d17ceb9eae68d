"""Membership in a run: tells the orchestrator the gateway's address, and hears the end of the run.

    JoinGateway -> welcome ... leave   the run has ended
                -> broken              again after a pause: the orchestrator may be started again

A gateway that serves other clients than a run's has no membership, and is never ended by this module.
"""

from __future__ import annotations

import time
from asyncio import sleep

import structlog

from services.common.aio import backoff
from services.common.errors import ConfigError, DeadlineError, RollmillError, UserError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.client.channel import channel, translated_errors
from services.common.rpc.client.refusals import refusal_behind
from services.common.rpc.client.run_client import AWAY_S, FIRST_WORD_S, TELL_S
from services.common.security.roles import Peer
from services.common.telemetry.log_events import LogEvent

log = structlog.get_logger()

FIRST_S = 3600.0  # for an orchestrator that has never answered: starting checkpoints are made before its start
_LONGEST_PAUSE_S = 2.0


async def stay(
    orchestrator: str, address: str, run_id: str = "", *, first_s: float = FIRST_S, away_s: float = AWAY_S
) -> None:
    """Return when the run has ended. ``address`` is where replicas reach this gateway.

    Raises:
        DeadlineError: the orchestrator did not answer for ``first_s``, or for ``away_s`` after it had.
        UserError: the orchestrator refuses this gateway: its keys or its run are not ours.
    """
    absence = _OrchestratorAbsence(first_s)
    async with channel(orchestrator, Peer.ORCHESTRATOR) as connection:
        stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(connection)
        while True:
            before = absence.since
            try:
                reason = await _one_stream(stub, address, run_id, absence)
            except UserError:
                raise  # refused for our keys or our run: joining again would be refused again
            except RollmillError as error:
                why = error.message
                if (refused := await refusal_behind(error, connection)) is not None:
                    raise refused from None
            else:
                if reason:
                    log.info(LogEvent.RUN_ENDED, reason=reason)
                    return
                why = "it stops"
            if absence.since != before:  # the orchestrator has answered meanwhile
                absence.limit_s = away_s
            absence.report(orchestrator, why)
            await sleep(next(absence.pauses))


class _OrchestratorAbsence:
    """Time since the orchestrator last answered, with a limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.end()

    def end(self) -> None:
        self.since = time.monotonic()
        self.pauses = backoff(longest_s=_LONGEST_PAUSE_S)
        self._tell_at = self.since + FIRST_WORD_S

    def report(self, orchestrator: str, why: str) -> None:
        """Log at intervals that the orchestrator is absent; raises ``DeadlineError`` when the absence lasts too long."""
        now = time.monotonic()
        silent_s = now - self.since
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            log.warning("orchestrator.waited_for", address=orchestrator, error=why, silent_s=round(silent_s))
        if silent_s > self.limit_s:
            raise DeadlineError(
                f"waiting for the orchestrator at {orchestrator}: no answer for {silent_s:.0f} s (limit {self.limit_s:g} s): "
                f"{why}; start it (deploy/launch/2_orchestrator.sh RECIPE), then this gateway again"
            )


async def _one_stream(
    stub: pool_pb2_grpc.PoolServiceAsyncStub, address: str, run_id: str, absence: _OrchestratorAbsence
) -> str:
    """One stream. Returns why to leave; empty when the stream ends without a reason. Raises ``RollmillError`` when the
    stream breaks."""
    call = stub.JoinGateway(pool_pb2.JoinGatewayRequest(address=address))
    welcomed = False
    try:
        with translated_errors("orchestrator", "JoinGateway"):
            async for response in call:
                welcomed = True
                if response.WhichOneof("command") == "leave":
                    return response.leave.reason or "the run has ended"
                if response.WhichOneof("command") == "welcome":
                    _check_run(run_id, response.welcome.run_id)
                    log.info("run.joined", run=response.welcome.run_id, address=address)
    finally:
        call.cancel()
        if welcomed:
            absence.end()  # the orchestrator was there until now
    return ""


def _check_run(own: str, found: str) -> None:
    if own and own != found:
        raise ConfigError(
            f"this gateway is of run {own!r}, but the orchestrator belongs to run {found!r}: name the orchestrator of the run "
            "with --orchestrator, or leave that out to serve without a run"
        )
