"""Finds ports for processes that start in a moment, which no other process takes meanwhile.

The kernel assigns ports of its ephemeral range, to processes that bind port 0 and to every outgoing connection: a free
port of that range may be taken before its process binds it. So ports below the range are searched, by each process from
a different start.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_BEGIN = 32768  # of Linux's ephemeral range
_WIDTH = 10_000  # ports below it that are looked at
_STRIDE = 37  # between the places of two processes with neighbouring ids


def free_ports(count: int, hosts: Sequence[str] = (LOOPBACK,), avoid: Collection[int] = ()) -> list[int]:
    """Different ports without a listener at any of these addresses of this machine, and not in ``avoid``.

    Raises:
        OSError: there are not as many.
    """
    end = _begin_of_ephemeral()
    begin = max(1024, end - _WIDTH)
    found: list[int] = []
    if end - begin > 4 * count:
        width = end - begin
        for step in range(width):
            if len(found) == count:
                return found
            port = begin + (os.getpid() * _STRIDE + step) % width
            if port not in avoid and all(is_free(port, host) for host in hosts):
                found.append(port)
    return [port for port in _of_the_kernel(count + len(avoid)) if port not in avoid][:count]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there; ``host`` is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _of_the_kernel(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]  # all held until the end, so that no two get the same
    try:
        for listener in held:
            listener.bind((LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in held]
    finally:
        for listener in held:
            listener.close()


def _begin_of_ephemeral() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_BEGIN
