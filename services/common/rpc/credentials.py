"""TLS credentials for gRPC servers and channels, from an identity, and a synchronous channel with them.

The synchronous channel is for commands and probes: without keys plain, with keys over TLS and with the token.
"""

from __future__ import annotations

import grpc

from services.common.security import identity
from services.common.security.bundle import Bundle
from services.common.security.identity import Identity
from services.common.security.roles import Peer

# Services reach each other at their own addresses; a proxy of the environment is for the outside.
DIRECT = ("grpc.enable_http_proxy", 0)


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """The identity's certificate; a renewed one is used from the next handshake on."""
    served = identity.bundle

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        fresh = identity.bundle
        if fresh is served:
            return None
        served = fresh
        return _configuration(fresh)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        renewed,  # type: ignore[arg-type]  # None: nothing has changed
        require_client_authentication=served.client_certificates,
    )


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """Trusts the run's authority only; presents the identity's certificate on request."""
    held = identity.bundle
    return grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)


def channel_options(peer: Peer) -> list[tuple[str, str]]:
    """The peer's certificate must have the name of the called service, at any address."""
    return [("grpc.ssl_target_name_override", peer.dns_name)]


def _configuration(held: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.ca)


def sync_channel(address: str, peer: Peer = Peer.MEMBER) -> grpc.Channel:
    """Like ``services.common.rpc.client.channel.channel``, without asyncio and without retries."""
    who = identity.current()
    if who is None:
        return grpc.insecure_channel(address, options=[DIRECT])
    credentials = grpc.composite_channel_credentials(
        channel_credentials(who), grpc.access_token_call_credentials(who.bundle.token)
    )
    return grpc.secure_channel(address, credentials, options=[DIRECT, *channel_options(peer)])
