"""Batched calls: each call of a message runs separately and is answered as soon as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from services.common.errors import InvalidRequestError, RollmillError
from services.common.rpc.limits import MOST_REQUESTS

log = structlog.get_logger()

Request = TypeVar("Request")
Response = TypeVar("Response")


async def answered(
    requests: Sequence[Request], answer: Callable[[Request], Awaitable[Response]]
) -> AsyncGenerator[list[tuple[int, Response | None]], None]:
    """Places and answers, those that came together in one list; None for a call that failed, which its caller makes again
    alone, to be told why. Leaving ends the calls that run. Raises ``InvalidRequestError`` for more than ``MOST_REQUESTS``.
    """
    if len(requests) > MOST_REQUESTS:
        raise InvalidRequestError(
            f"a message has {len(requests)} requests; at most {MOST_REQUESTS} are taken: send them in several messages"
        )
    ended: asyncio.Queue[int] = asyncio.Queue()
    tasks: list[asyncio.Task[Response | None]] = []
    try:
        for place, request in enumerate(requests):
            task = asyncio.create_task(_told(answer(request)), name=f"call {place} of a message")
            task.add_done_callback(lambda _, place=place: ended.put_nowait(place))  # type: ignore[misc]
            tasks.append(task)
        left = len(tasks)
        while left:
            places = [await ended.get()]  # each call has its deadline
            while not ended.empty():
                places.append(ended.get_nowait())
            left -= len(places)
            yield [(place, tasks[place].result()) for place in places]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _told(answer: Awaitable[Response]) -> Response | None:
    try:
        return await answer
    except RollmillError:
        return None
    except Exception:  # of one call: its caller, who makes it again alone, is told
        log.exception("batches.call_failed")
        return None
