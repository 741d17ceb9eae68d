"""Sends one answer as server-sent events while its turn is taken.

Text that may begin a call or a stop is held back until the decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable

from aiohttp import web

from services.common.aio import ended
from services.common.text.tool_calls import OPEN
from services.inference.endpoint.dialects.base import AnswerWriter, UnknownSessionError, known
from services.inference.endpoint.sessions import Asked, ServedSession
from services.inference.workflows.agents.stop_text import IncrementalText, settled
from services.inference.workflows.agents.turns import CapturedTurn


class Stream:
    """``send`` once."""

    def __init__(self, request: web.Request, session: ServedSession, asked: Asked, writer: AnswerWriter) -> None:
        self._request = request
        self._session = session
        self._asked = asked
        self._writer = writer
        turn = asked.turn
        self._held = (*turn.stop, *((OPEN,) if turn.tools and turn.read_calls else ()))
        self._opening = tuple(writer.begin())  # made first: events are numbered
        self._response: web.StreamResponse | None = None

    async def send(self) -> web.StreamResponse:
        """Raises ``RollmillError`` for a turn that failed before the first event."""
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[int | None] = asyncio.Queue()

        def on_token(token: int) -> None:  # in the engine's thread, or here
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(tokens.put_nowait, token)

        asked, captured = self._asked, self._session.captured
        turn_task = asyncio.ensure_future(captured.take_turn(asked.turn, asked.locate, on_token))
        turn_task.add_done_callback(lambda _: tokens.put_nowait(None))
        try:
            turn = await in_session(self._session, self._follow(tokens, turn_task))
            self._session.answered(self._writer.id, asked, turn)
            events = list(self._writer.finish(turn))
            self._session.store(self._writer)  # before the client knows of the end
            await self._write(events)
        except ConnectionResetError:
            raise  # the client has left
        except Exception as error:
            if self._response is None:
                raise  # an ordinary refusal
            await self._write(self._writer.fail(known(error)))
        finally:
            await ended(turn_task)
        response = await self._begun()
        await response.write_eof()
        return response

    async def _follow(self, tokens: asyncio.Queue[int | None], turn_task: asyncio.Future[CapturedTurn]) -> CapturedTurn:
        """Send settled text until the turn ends."""
        growing = IncrementalText(self._writer.chat)
        while (token := await tokens.get()) is not None:
            growing.add(token)
            if tokens.empty():
                await self._write(self._writer.text(settled(growing.text, self._held)))
        return await turn_task

    async def _write(self, events: Iterable[bytes]) -> None:
        for each in events:
            await (await self._begun()).write(each)

    async def _begun(self) -> web.StreamResponse:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
            for each in self._opening:
                await self._response.write(each)
        return self._response


async def in_session(session: ServedSession, work: Awaitable[CapturedTurn]) -> CapturedTurn:
    """Wait for a turn; if the session ends first, the request is refused like one without a session."""
    task = asyncio.ensure_future(work)
    session.running.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise  # the client left
        raise UnknownSessionError("the rollout of this session is over") from None
    finally:
        session.running.discard(task)
