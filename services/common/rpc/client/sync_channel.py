"""A synchronous channel, for commands and probes: without keys plain, with keys over TLS and with the token."""

from __future__ import annotations

import grpc

from services.common.rpc.credentials import channel_credentials, channel_options
from services.common.security import identity
from services.common.security.roles import Peer


def sync_channel(address: str, peer: Peer = Peer.MEMBER) -> grpc.Channel:
    """Like ``services.common.rpc.client.channel.channel``, without asyncio and without retries."""
    who = identity.current()
    if who is None:
        return grpc.insecure_channel(address)
    credentials = grpc.composite_channel_credentials(
        channel_credentials(who), grpc.access_token_call_credentials(who.bundle.token)
    )
    return grpc.secure_channel(address, credentials, options=channel_options(peer))
