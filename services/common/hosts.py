"""Addresses of machines: how one is written with a port, and whether it is this one's. Imports nothing heavy."""

from __future__ import annotations

import functools
import socket

from services.common.errors import ConfigError

ORCHESTRATOR = "127.0.0.1:50050"  # where commands look for one when nobody says where


def address(host: str, port: int) -> str:
    """Host and port as services dial them.

    >>> address("fd00::7", 50050)
    '[fd00::7]:50050'
    """
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """A host as it stands in front of a port: IPv6 addresses in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def check_place(place: str) -> None:
    """Raises ``ConfigError`` for what is no ``HOST:PORT``, which nobody could ever answer."""
    port = place.rpartition(":")[2]
    if not host_of(place) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{place!r} is no address: write HOST:PORT, such as 127.0.0.1:50050")


def is_known(place: str) -> bool:
    """Whether the host of ``HOST:PORT`` has an address here, reachable or not."""
    try:
        socket.getaddrinfo(host_of(place), None)
    except OSError:
        return False
    return True


def host_of(place: str) -> str:
    """The host of ``HOST:PORT``, without brackets."""
    return place.rpartition(":")[0].strip("[]")


def host_and_port(place: str) -> tuple[str, int]:
    """The inverse of ``address``. Raises ``ValueError`` for what has no port.

    >>> host_and_port("[fd00::7]:50050")
    ('fd00::7', 50050)
    """
    return host_of(place), int(place.rpartition(":")[2])


@functools.cache
def is_here(host: str) -> bool:
    """Whether a host is this machine, loopback included: a socket can be bound to it. Names are resolved."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def _can_bind(family: int, place: object) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)  # type: ignore[arg-type]
    except OSError:
        return False
    return True
