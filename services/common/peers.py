"""Whom a limit counts as one peer: the address that calls, not its connection. Knows neither gRPC nor HTTP."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

LOOPBACK = "loopback"
"""All of this machine's own addresses: who calls from it may choose any of 127.0.0.0/8 for each connection."""

_SITE_BITS = 64  # of an IPv6 address; a machine chooses the rest freely


def peer_of_host(host: str) -> str:
    """The peer that calls from an address, without port. An IPv6 peer is its /64; what is no address is itself.

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


@lru_cache(4096)  # asked at every call
def peer_of_grpc(connection: str) -> str:
    """The peer of a connection as gRPC names it.

    >>> peer_of_grpc("ipv4:127.0.0.1:51000"), peer_of_grpc("ipv6:%5B::1%5D:51000")
    ('loopback', 'loopback')
    """
    kind, _, place = connection.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind  # a socket of this machine
    return peer_of_host(unquote(place).rpartition(":")[0])
