"""A Redis client that fails fast: callers that know the lost request decide on a retry."""

from __future__ import annotations

import asyncio

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.common.errors import ConfigError
from services.envgateway.variables import check_redis, without_user

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
    check_redis(uri, allow_plain)
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
        raise ConfigError(f"{without_user(uri)} is no URI of Redis: {error}") from None


def raise_if_cancelled() -> None:
    """Call between commands: the client writes under ``asyncio.wait_for``, which in Python 3.11 loses a cancellation
    that comes in the moment when the write ends."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
