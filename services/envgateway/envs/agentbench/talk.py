"""Requests shared by both protocols: questions, turns that wait for a busy server, and cancelling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from services.common.aio import backoff
from services.common.errors import InfrastructureError
from services.envgateway.envs.agentbench.http import HttpConnection, Reply, UnansweredError
from services.envgateway.envs.base import EpisodeLostError

log = structlog.get_logger()

_QUESTION_S = 10.0  # requests that start no session
_LEAST_S = 0.1  # with less, a server could take the turn and its answer come too late
_CANCEL_S = 4.5  # less than the gateway waits for an environment to close


async def ask(http: HttpConnection, path: str, **query: str) -> Reply:
    """Send a read-only request. Raises ``InfrastructureError`` when no answer comes."""
    try:
        return await http.get(path, _QUESTION_S, **query)
    except UnansweredError as error:
        raise InfrastructureError(str(error)) from error


async def start(http: HttpConnection, path: str, timeout_s: float, body: object) -> Reply:
    """Raises ``InfrastructureError``. The server collects a session whose start we did not hear of."""
    try:
        return await http.post(path, timeout_s, body)
    except UnansweredError as error:
        raise InfrastructureError(f"{error}: if it began, the server collects it") from error


async def take_turn(
    http: HttpConnection, path: str, timeout_s: float, body: object, is_busy: Callable[[Reply], bool]
) -> Reply:
    """Ask until the server takes the turn, within the time of one.

    Raises:
        InfrastructureError: the server did not take the turn; the caller may repeat the turn.
        EpisodeLostError: the server may have taken the turn, but does not answer.
    """
    until = time.monotonic() + timeout_s
    left_s = timeout_s
    for pause_s in backoff(first_s=0.2, longest_s=2.0):
        try:
            reply = await http.post(path, left_s, body)
        except UnansweredError as error:
            raise EpisodeLostError(f"{error}: the turn may have been taken") from error
        if not is_busy(reply):
            return reply
        left_s = until - time.monotonic() - pause_s
        if left_s < _LEAST_S:
            break
        await asyncio.sleep(pause_s)
    raise InfrastructureError(f"{http.url} was busy with this session for {timeout_s:g} s")


async def cancel(http: HttpConnection, path: str, body: object) -> None:
    """End a session early. Failures are logged: the server collects sessions that remain."""
    try:
        reply = await http.post(path, _CANCEL_S, body)
    except (UnansweredError, InfrastructureError) as error:
        log.warning("agentbench.cancel_failed", error=str(error))
        return
    if reply.status != 200:
        log.info("agentbench.not_cancelled", status=reply.status, detail=reply.detail)
