"""TLS credentials for gRPC servers and channels, from an identity.

grpc for Python either demands a certificate of every caller or asks for none, so a run decides
(``client_certificates``): with them the handshake admits members of the run only; without, each call has a token, and a
refusal has a reason.
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
    """Trusts the run's authority only; presents the identity's certificate on request."""
    held = identity.bundle
    return grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)


def channel_options(peer: Peer) -> list[tuple[str, str]]:
    """The peer's certificate must have the name of the called service, at any address."""
    return [("grpc.ssl_target_name_override", peer.dns_name)]


def _configuration(held: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.ca)
