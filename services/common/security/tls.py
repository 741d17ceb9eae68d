"""TLS from an identity for everything that takes an ``ssl.SSLContext``: HTTP servers."""

from __future__ import annotations

import ssl

from services.common.security import bundle as files
from services.common.security.identity import Identity


def server_context(who: Identity) -> ssl.SSLContext:
    """Takes callers in with a certificate of the run or without one, unless the run demands certificates.

    Renewed keys are used from the next handshake on.
    """
    made, generation = _server_context(who), who.generation

    def renewed(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal made, generation
        _ = who.bundle  # looks at the files
        if generation != who.generation:
            made, generation = _server_context(who), who.generation
        if connection.context is not made:
            connection.context = made

    listening = _server_context(who)
    listening.sni_callback = renewed  # called for every handshake, with or without a name
    return listening


def _server_context(who: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(who.folder / files.CERTIFICATE, who.folder / files.KEY)
    context.load_verify_locations(cadata=who.bundle.ca.decode())
    context.verify_mode = ssl.CERT_REQUIRED if who.bundle.client_certificates else ssl.CERT_OPTIONAL
    return context
