"""A port for a server that a test starts at once."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free at this moment, and another one at the next call; only what is started at once should rely on it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
