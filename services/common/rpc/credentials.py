"""TLS for gRPC from an identity: what a server offers, what a channel trusts.

grpc for Python either demands a certificate of every caller or asks for none, so a run decides (``client_certificates``):
with them the handshake lets in members of the run only; without, each call has a token, and what is refused gets a reason.
"""

from __future__ import annotations

import grpc

from services.common.security.bundle import Bundle
from services.common.security.identity import Identity
from services.common.security.roles import Peer


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
    """Trusts the run's authority alone; shows the identity's certificate to those who ask."""
    held = identity.bundle
    return grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)


def channel_options(peer: Peer) -> list[tuple[str, str]]:
    """Who answers must be what is called for, wherever it runs."""
    return [("grpc.ssl_target_name_override", peer.dns_name)]


def _configuration(held: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.ca)
