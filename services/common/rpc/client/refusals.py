"""Distinguishes a peer that is down, and may come back, from one that the keys separate from us for ever."""

from __future__ import annotations

import time

import grpc

from services.common.errors import AccessError, DeadlineError, InfrastructureError, RollmillError
from services.common.rpc.client.channel import ServiceChannel
from services.common.security.handshake import refusal

LOOK_EVERY_S = 5.0

_looked_at: dict[str, float] = {}


async def refusal_behind(error: RollmillError, connection: grpc.aio.Channel) -> AccessError | None:
    """The refusal of which a failed call is the consequence: wrong, expired or missing keys on either side.

    None when there is none, and for calls that fail within ``LOOK_EVERY_S`` of a look at the same address.
    """
    if isinstance(error, AccessError):
        return error
    if not isinstance(error, InfrastructureError | DeadlineError) or not isinstance(connection, ServiceChannel):
        return None
    now = time.monotonic()
    if now - _looked_at.get(connection.address, -LOOK_EVERY_S) < LOOK_EVERY_S:
        return None
    _looked_at[connection.address] = now
    return await refusal(connection.address, connection.who, connection.peer)
