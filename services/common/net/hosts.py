"""Formats addresses with a port, recognises this machine's own, and names the peer of a connection. No heavy imports.

A host's identity tells which processes can map each other's files: two with the same identity see the same /dev/shm.
The kernel's boot id tells machines apart, the device of /dev/shm tells containers of one machine apart.

A limit of HTTP applies to an address, not a connection. Independent of gRPC and HTTP.
"""

from __future__ import annotations

import functools
import os
import socket
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from services.common.errors import ConfigError

ORCHESTRATOR = "127.0.0.1:50050"  # the default of commands

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")


def address(host: str, port: int) -> str:
    """Host and port as services dial them.

    >>> address("fd00::7", 50050)
    '[fd00::7]:50050'
    """
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """A host as written before a port: IPv6 addresses in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def check_place(place: str) -> None:
    """Raise ``ConfigError`` for anything but ``HOST:PORT``."""
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
    """The inverse of ``address``. Raises ``ValueError`` without a port.

    >>> host_and_port("[fd00::7]:50050")
    ('fd00::7', 50050)
    """
    return host_of(place), int(place.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to this address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.cache
def is_here(host: str) -> bool:
    """Whether a host is this machine, loopback included, so that a socket can be bound there. Names are resolved."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


@functools.cache
def host_identity() -> str:
    """The same text in every process that sees this one's shared memory; empty where that cannot be known."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_SHARED_MEMORY).st_dev}"
    except OSError:
        return ""


def _can_bind(family: int, place: object) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)  # type: ignore[arg-type]
    except OSError:
        return False
    return True


LOOPBACK = "loopback"
"""All of this machine's own addresses: a local caller may choose any of 127.0.0.0/8 for each connection."""

_SITE_BITS = 64  # of an IPv6 address; a machine chooses the rest freely


def peer_of_host(host: str) -> str:
    """The peer of an address without port. An IPv6 peer is its /64; any other name is a peer of its own.

    >>> peer_of_host("127.0.0.9"), peer_of_host("10.0.0.7"), peer_of_host("fd00::7")
    ('loopback', '10.0.0.7', 'fd00::/64')
    """
    bare = host.strip("[]").partition("%")[0]
    try:
        address = ip_address(bare)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, IPv6Address):
        return f"{IPv6Address(int(address) >> _SITE_BITS << _SITE_BITS)}/{_SITE_BITS}"
    return str(address)
