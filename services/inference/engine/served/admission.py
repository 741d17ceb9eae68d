"""A queue of requests that wait for a server, and the choice of the server. One event loop, no HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from services.common.errors import InfrastructureError
from services.inference.engine.served.balance import PrefixMap, choose
from services.inference.engine.served.request_state import RequestState
from services.inference.engine.served.server import Server


class AdmissionQueue:
    """Admits requests to servers: ``enter`` waits for a server with room, ``leave`` frees the place."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._prefixes = PrefixMap()
        self._queue: deque[tuple[RequestState, asyncio.Future[Server | None]]] = deque()
        self._closed: str | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def enter(self, state: RequestState) -> Server | None:
        """A server with room for a request, counted as in flight there; None when the request was aborted.

        No deadline of its own: the queue moves as long as a server serves, and ``close`` ends it when none will.
        """
        if self._closed is not None:
            raise InfrastructureError(self._closed)
        turn: asyncio.Future[Server | None] = asyncio.get_running_loop().create_future()
        waiting = (state, turn)
        self._queue.append(waiting)
        self.dispatch()
        ended = asyncio.ensure_future(state.abort_requested.wait())
        either: set[asyncio.Future[Any]] = {turn, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return turn.result() if turn.done() else None
        except asyncio.CancelledError:
            if turn.done() and not turn.exception() and (server := turn.result()):
                self.leave(server)
            raise
        finally:
            ended.cancel()
            if waiting in self._queue:
                self._queue.remove(waiting)

    def leave(self, server: Server) -> None:
        server.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Admit requests while a server has room. Called when a server may have room."""
        while self._queue:
            free = {s.index: (s.in_flight, s.window.size) for s in self._servers if s.has_room}
            if not free:
                return
            state, turn = self._queue.popleft()
            sequence = state.sequence
            server = self._servers[choose(free, self._prefixes.find(sequence))]
            server.in_flight += 1
            self._prefixes.note(sequence, server.index)
            turn.set_result(server)

    def forget(self, server: Server) -> None:
        """Note that a server has lost its cache."""
        self._prefixes.forget(server.index)

    def close(self, reason: str) -> None:
        """Fail all waiting and future requests with ``reason``."""
        self._closed = reason
        while self._queue:
            self._queue.popleft()[1].set_exception(InfrastructureError(reason))
