"""A Redis client that fails fast: callers that know the lost request decide on a retry."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.common.errors import ConfigError
from services.common.net.hosts import is_loopback

BLOCK_MS = 1000  # of blocking reads
_TIMEOUT_S = 10.0  # of any answer, so more than BLOCK_MS
_MAX_CONNECTIONS = 32

Client = redis.asyncio.Redis
UNREACHABLE = (RedisError, OSError)  # errors of a command when Redis is absent or another server


def connect(uri: str, allow_plain: bool) -> Client:
    """A client that has not connected yet.

    Raises:
        ConfigError: not a URI of Redis, or one that would send jobs over a network without TLS.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"{_shown(uri)} is no URI of Redis: write redis://HOST:PORT, rediss://HOST:PORT (TLS) or "
                          "unix:///path/to/socket")  # fmt: skip
    if parts.scheme == "redis" and not is_loopback(parts.hostname or "localhost") and not allow_plain:
        raise ConfigError(
            f"{_shown(uri)} would carry jobs and verdicts over a network without TLS: use rediss://, or, in a network "
            "that you trust, set envgateway.queue.allow_plain_redis: true (for workers the variable "
            "ALLOW_PLAIN_REDIS=1)"
        )
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(  # one that waits: many jobs may speak at once
            uri,
            timeout=_TIMEOUT_S,
            protocol=2,  # one shape of replies, for all versions of the server
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            socket_keepalive=True,
            max_connections=_MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"{_shown(uri)} is no URI of Redis: {error}") from None


def raise_if_cancelled() -> None:
    """Call between commands: the client writes under ``asyncio.wait_for``, which in Python 3.11 loses a cancellation
    that comes in the moment when the write ends."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _shown(uri: str) -> str:
    """The URI without user and password."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
