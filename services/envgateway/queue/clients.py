"""On whose behalf the current task works, so that clients can share slots fairly.

Servers set it at their edge; it follows every task that a call starts. Knows nothing of grpc, HTTP or queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_client: ContextVar[str] = ContextVar("client", default="")


def current_client() -> str:
    """Empty for the gateway itself."""
    return _client.get()


@contextmanager
def on_behalf_of(client: str) -> Iterator[None]:
    """What runs inside, and the tasks it starts, work for this client."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)
