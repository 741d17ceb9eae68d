"""The client of the current task, so that clients can share slots fairly.

Servers set the client at their edge; every task that a call starts inherits the client.
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
    """The code inside, and the tasks that the code starts, work for this client."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)
