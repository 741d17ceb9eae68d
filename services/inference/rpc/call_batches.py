"""Batches calls of one event-loop iteration into one message; each call returns as soon as its answer comes.

The rollouts that end in one decoding step ask for their rewards at once, and those whose turns end, for their tools: a dozen
messages would cost as much as a dozen answers. A single call, or a call that fails in a batch, is sent by itself: this
separate call reports errors, waits for a connection and is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

import grpc

from services.common.aio import TaskOwner

MOST_CALLS = 64  # of one message
MOST_BYTES = 1 << 20  # of one message; the gateway takes four times as much

Request = TypeVar("Request")
Response = TypeVar("Response")

Alone = Callable[[Request, float], Awaitable[Response]]
Batch = Callable[[list[Request], float], AsyncIterable[Iterable[tuple[int, Response | None]]]]

_Waiting = tuple[Request, "asyncio.Future[Response | None]"]


class CallBatcher(Generic[Request, Response]):
    """``await calls.call(request, timeout_s)``. Cancelling the last caller of a message cancels the message."""

    def __init__(
        self,
        tasks: TaskOwner,
        alone: Alone[Request, Response],
        batch: Batch[Request, Response],
        size: Callable[[Request], int],
    ) -> None:
        """``alone`` and ``batch`` take a timeout in seconds; ``batch`` gives places and answers, None for a call that
        failed. ``size``: the bytes of a request."""
        self._tasks = tasks
        self._alone = alone
        self._batch = batch
        self._size = size
        self._waiting: dict[float, list[_Waiting[Request, Response]]] = {}  # by timeout

    async def call(self, request: Request, timeout_s: float) -> Response:
        """Raises the errors of ``alone``."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answer: asyncio.Future[Response | None] = loop.create_future()
        self._waiting.setdefault(timeout_s, []).append((request, answer))
        response = await answer
        return response if response is not None else await self._alone(request, timeout_s)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for timeout_s, calls in waiting.items():
            for message in self._messages([call for call in calls if not call[1].done()]):
                if len(message) == 1:
                    message[0][1].set_result(None)
                else:
                    self._start(message, timeout_s)

    def _messages(self, calls: list[_Waiting[Request, Response]]) -> list[list[_Waiting[Request, Response]]]:
        messages: list[list[_Waiting[Request, Response]]] = []
        num_bytes = 0
        for call in calls:
            size = self._size(call[0])
            if not messages or len(messages[-1]) == MOST_CALLS or num_bytes + size > MOST_BYTES:
                messages.append([])
                num_bytes = 0
            messages[-1].append(call)
            num_bytes += size
        return messages

    def _start(self, message: list[_Waiting[Request, Response]], timeout_s: float) -> None:
        task = self._tasks.start(self._exchange(message, timeout_s), f"{len(message)} calls in one message")

        def left(one: asyncio.Future[Response | None]) -> None:
            if one.cancelled() and all(answer.done() for _, answer in message):
                task.cancel()

        for _, answer in message:
            answer.add_done_callback(left)

    async def _exchange(self, message: list[_Waiting[Request, Response]], timeout_s: float) -> None:
        """The deadline is the message's own, which the channel holds."""
        try:
            async for answers in self._batch([request for request, _ in message], timeout_s):
                for place, response in answers:
                    if place < len(message) and not message[place][1].done():
                        message[place][1].set_result(response)
        except grpc.RpcError:  # each is sent alone, which gives the precise error
            pass
        finally:
            for _, answer in message:
                if not answer.done():
                    answer.set_result(None)
