"""One trap of grpc.aio, handled once for every stream that a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import InfrastructureError


@contextmanager
def call_cancellation_is_an_error(call: str) -> Iterator[None]:
    """Turn the ``CancelledError`` of a cancelled *call* into an ``InfrastructureError``.

    grpc.aio raises it in the task that reads, also when the server ended the call with CANCELLED (as one that
    stops does). Taken for the cancellation of the task itself, it would end a loop that should reconnect.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError:
        if task is None or task.cancelling() > before:
            raise
        raise InfrastructureError(f"{call}: the call was cancelled") from None
