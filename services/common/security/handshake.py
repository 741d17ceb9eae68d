"""Finds the reason why a connection to a peer fails because of keys.

grpc only reports a failed connection, and often only a timeout. So this module repeats the handshake with ``ssl``,
which reports the reason.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

from services.common.errors import AccessError, UnauthenticatedError
from services.common.net.hosts import host_and_port
from services.common.security import bundle as files
from services.common.security.identity import Identity
from services.common.security.roles import Peer
from services.common.security.times import moment

PROBE_S = 2.0  # for connecting, and again for the handshake
_CLOSED_TIMES = 3  # handshakes in a row after which a server that closes is not one that happens to be ending
_BETWEEN_S = 1.0
_FIRST_WORD_S = 0.5  # a server that refuses our certificate says so after its own handshake is done

_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_...
_WRONG_NAMES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


async def refusal(address: str, who: Identity | None, peer: Peer = Peer.MEMBER) -> AccessError | None:
    """The error of keys between this process and ``HOST:PORT``; None if keys are not the reason.

    Takes a few seconds at most.
    """
    return await asyncio.to_thread(refusal_now, address, who, peer)


def refusal_now(address: str, who: Identity | None, peer: Peer = Peer.MEMBER) -> AccessError | None:
    """The same, for callers without an event loop."""
    for remaining in reversed(range(_CLOSED_TIMES)):
        try:
            with socket.create_connection(host_and_port(address), PROBE_S) as connection:
                connection.settimeout(PROBE_S)
                return _without_keys(address, connection) if who is None else _with_keys(address, connection, who, peer)
        except _ClosedError:
            if remaining:
                time.sleep(_BETWEEN_S)
        except (OSError, ValueError):
            return None  # nothing listens there: keys are not the reason
    assert who is not None
    return _refused(address, "it closed the connection", who)


class _ClosedError(Exception):
    """The server ended the connection right after a good handshake: a refusal, or its own end."""


def _without_keys(address: str, connection: socket.socket) -> AccessError | None:
    try:
        _anyone().wrap_socket(connection).close()
    except (ssl.SSLError, OSError):
        return None
    return UnauthenticatedError(
        f"{address} speaks TLS, and this process has no keys: set {files.VARIABLE} to the directory of its role "
        "(rollmill keys)",
        why="no_keys",
    )


def _with_keys(address: str, connection: socket.socket, who: Identity, peer: Peer) -> AccessError | None:
    context = _anyone()
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = True
    context.load_verify_locations(cadata=who.bundle.ca.decode())
    context.load_cert_chain(who.folder / files.CERTIFICATE, who.folder / files.KEY)
    talking = False
    try:
        with context.wrap_socket(connection, server_hostname=peer.dns_name) as talk:
            talking = True
            talk.settimeout(_FIRST_WORD_S)
            if not talk.recv(1) and who.bundle.client_certificates:
                raise _ClosedError
    except ssl.SSLCertVerificationError as error:
        return _distrusted(address, error, who, peer)
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return UnauthenticatedError(
                f"{address} speaks no TLS, and this process has keys: start that service with {files.VARIABLE} set too, or "
                "this one without",
                why="plain",
            )
        if "ALERT" in (error.reason or ""):
            return _refused(address, error.reason or "", who)
        return None
    except OSError as error:
        if talking and who.bundle.client_certificates:
            raise _ClosedError from error
        return None  # before it showed a certificate: a process that is ending, or a forwarder without a target
    return None


def _distrusted(address: str, error: ssl.SSLCertVerificationError, who: Identity, peer: Peer) -> AccessError:
    now = who.clock()
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        begins, ends, role = _validity(address)
        times = f"{moment(begins)} to {moment(ends)}, and the clock here says {moment(now)}"
        if error.verify_code == _EXPIRED:
            return UnauthenticatedError(
                f"the certificate of {role} at {address} has expired (valid {times}): make new keys with "
                "`rollmill keys ... --renew` and copy them there",
                why="expired",
            )
        return UnauthenticatedError(
            f"the certificate of {role} at {address} is not valid yet (valid {times}): the clock here is at least "
            f"{max(0.0, begins - now):.0f} s behind; set it right",
            why="not_yet_valid",
        )
    if error.verify_code in _WRONG_NAMES:
        _, _, role = _validity(address)
        return UnauthenticatedError(
            f"{address} is {role}, not {peer.value}: the address is wrong, or another service answers in its place",
            why="peer",
        )
    return UnauthenticatedError(
        f"{address} has a certificate that this run's authority did not sign ({error.verify_message}): it belongs to "
        f"another run, or has keys of another `rollmill keys`; this process has those in {who.folder}",
        why="run",
    )


def _refused(address: str, said: str, who: Identity) -> AccessError:
    now = who.clock()
    own = f"the certificate of role {who.role.value} in {who.folder}"
    if now > who.ends_at:
        return UnauthenticatedError(
            f"{own} expired at {moment(who.ends_at)}: make new keys with `rollmill keys ... --renew`", why="expired"
        )
    return UnauthenticatedError(
        f"{address} refuses {own} ({said}): is it of the same run, and are the clocks of both machines right?",
        why="run",
    )


def _validity(address: str) -> tuple[float, float, str]:
    """The validity and the holder of the certificate at an address; trust is not checked."""
    from services.common.errors import ConfigError
    from services.common.security.certificates import holder_of

    try:
        with (
            socket.create_connection(host_and_port(address), PROBE_S) as connection,
            _anyone().wrap_socket(connection) as talk,
        ):
            holder = holder_of(talk.getpeercert(binary_form=True) or b"")
    except (OSError, ConfigError):
        return 0.0, time.time(), "the service"
    return holder.begins_at, holder.ends_at, holder.role.value


def _anyone() -> ssl.SSLContext:
    """A context that trusts any peer: to read its certificate, never to exchange data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
