"""The endpoint's routes over aiohttp.

    POST /v1/chat/completions      GET /v1/models

Every request names its session, in the header ``X-Millrace-Session`` or as its API key, and sees nothing else. A session
lives as long as its rollout. A client that leaves takes its generation with it. In a run with keys the routes are https,
and what an agent is given as its session also holds the token that lets it in (``access``).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import structlog
from aiohttp import web

from services.common.aio import ended
from services.common.chat import Message
from services.common.config.services import EndpointConfig
from services.common.errors import InvalidRequestError, MillraceError, UnknownPolicyError
from services.common.http.answers import json_answer
from services.common.http.listener import Listener
from services.common.security import identity
from services.common.tool_calls import OPEN
from services.inference.endpoint.access import (
    SESSION_HEADER,
    agent_of,
    base_url,
    shown_session,
    shown_token,
    trust,
    with_token,
)
from services.inference.endpoint.answers import (
    Heading,
    chunk,
    completion,
    last_chunks,
    logprobs_of,
    models,
    usage_chunk,
)
from services.inference.endpoint.body import KnownHead, ReadBody, read_body
from services.inference.endpoint.schema import (
    DEFAULT_MODEL,
    ChatRequest,
    UnknownSessionError,
    read_request,
    refusal,
)
from services.inference.workflows.captured import Ask, CapturedSession, CapturedTurn, Located, Thread
from services.inference.workflows.chat_messages import plain_message
from services.inference.workflows.spoken import GrowingText, settled

log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServedSession:
    """A captured session with its running requests, and with the bodies that its threads' next requests begin with."""

    def __init__(self, captured: CapturedSession) -> None:
        self.captured = captured
        self.running: set[asyncio.Task[Any]] = set()
        self._heads: dict[KnownHead, Thread] = {}
        self._head_of: dict[Thread, KnownHead] = {}

    def read(self, text: str) -> ReadBody:
        return read_body(text, reversed(self._head_of.values()))

    def locator(self, ask: Ask, body: ReadBody, text: str) -> Callable[[], Located]:
        """Finds the thread that a body extends when its turn begins; in full where the short way is of no use."""
        new = _plain(body.messages)

        def locate() -> Located:
            if body.known is None:
                return self.captured.locate(ask, new)
            thread = self._heads.get(body.known)
            if (
                thread is not None
                and not thread.busy
                and (thread.policy, thread.tools_key) == (ask.policy, ask.tools_key())
                and len(new) > 1
                and new[0] == thread.messages[-1]
            ):
                return thread, new[1:]
            return self.captured.locate(ask, _plain(read_body(text).messages))

        return locate

    def answered(self, head: KnownHead, thread: Thread) -> None:
        """A body with this head was answered by this thread."""
        if (old := self._head_of.pop(thread, None)) is not None:
            self._heads.pop(old, None)
        self._heads[head] = thread
        self._head_of[thread] = head


class EndpointServer:
    """``start`` serves, ``stop`` ends; an ``Endpoint`` of workflows meanwhile. Raises ``ConfigError`` for a bad bind."""

    def __init__(self, config: EndpointConfig, host: str, *, setting: str) -> None:
        """``setting`` is the port's path in the recipe."""
        assert config.port is not None
        self._host = host
        self._sessions: dict[str, ServedSession] = {}
        application = web.Application(client_max_size=config.body_bytes, middlewares=[_refusing])
        application.add_routes([web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)])
        self._listener = Listener(
            application,
            host,
            config.port,
            name="the endpoint",
            setting=setting,
            group="endpoint",
            leaving_cancels=True,
            refuse=lambda error, status: json_answer(refusal(error)[1], status),
            shown=shown_token,
        )
        self._who = identity.current()
        self._agent = None if self._who is None else agent_of(self._who)

    @property
    def base_url(self) -> str:
        return base_url(self._host, self._listener.port, secure=self._listener.is_secure)

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        return self._listener.routes

    async def start(self) -> int:
        """Returns the port."""
        if self._who is not None:
            trust(self._who)
        return await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    @contextlib.contextmanager
    def opened(self, session: CapturedSession) -> Iterator[str]:
        """Serve a session under the id that this gives; at the end its calls are over."""
        session_id = secrets.token_urlsafe(24)
        served = self._sessions[session_id] = ServedSession(session)
        try:
            yield session_id if self._agent is None else with_token(session_id, self._agent)
        finally:
            del self._sessions[session_id]
            for task in served.running:
                task.cancel()

    # -- routes -------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return json_answer(models(self._session(request).captured.policies))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        text = _text(await request.read())
        body = session.read(text)
        asked = read_request(body.fields)
        policy = _policy_of(asked.model, session.captured)
        ask = asked.ask(policy)
        locate = session.locator(ask, body, text)
        heading = Heading(model=policy)
        chat = session.captured.policies[policy].chat
        if asked.stream:
            return await _Stream(request, session, asked, ask, heading).send(locate, body.head)
        turn = await _in_session(session, session.captured.take_turn(ask, locate))
        session.answered(body.head, turn.thread)
        return json_answer(completion(heading, turn, logprobs_of(turn, chat) if asked.logprobs else None))

    def _session(self, request: web.Request) -> ServedSession:
        session = self._sessions.get(shown_session(request))
        if session is None:
            raise UnknownSessionError(
                f"no rollout has this session, or it is over: send the session that the agent was given, in the header "
                f"{SESSION_HEADER} or as the API key"
            )
        return session


class _Stream:
    """One answer as server-sent events. What may be the beginning of a call or of a stop is held back until it is known."""

    def __init__(
        self, request: web.Request, session: ServedSession, asked: ChatRequest, ask: Ask, heading: Heading
    ) -> None:
        self._request = request
        self._session = session
        self._asked = asked
        self._heading = heading
        self._chat = session.captured.policies[ask.policy].chat
        self._ask = ask
        self._held = (*ask.stop, *((OPEN,) if ask.tools and ask.read_calls else ()))
        self._sent = ""
        self._response: web.StreamResponse | None = None

    async def send(self, locate: Callable[[], Located], head: KnownHead) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[int | None] = asyncio.Queue()

        def on_token(token: int) -> None:  # in the engine's thread, or here
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(tokens.put_nowait, token)

        turn_task = asyncio.ensure_future(self._session.captured.take_turn(self._ask, locate, on_token))
        turn_task.add_done_callback(lambda _: tokens.put_nowait(None))
        try:
            turn = await _in_session(self._session, self._follow(tokens, turn_task))
            self._session.answered(head, turn.thread)
            await self._finish(turn)
        except MillraceError as error:
            if self._response is None:
                raise  # nothing was sent: an ordinary refusal
            await self._event(refusal(error)[1])
        finally:
            await ended(turn_task)
        response = await self._begun()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _follow(self, tokens: asyncio.Queue[int | None], turn_task: asyncio.Future[CapturedTurn]) -> CapturedTurn:
        """Send text as it settles, until the turn is taken."""
        growing = GrowingText(self._chat)
        while (token := await tokens.get()) is not None:
            growing.add(token)
            if tokens.empty():
                await self._send_text(settled(growing.text, self._held))
        return await turn_task

    async def _send_text(self, text: str) -> None:
        if len(text) > len(self._sent):
            await self._event(chunk(self._heading, {"content": text[len(self._sent) :]}))
            self._sent = text

    async def _finish(self, turn: CapturedTurn) -> None:
        logprobs = logprobs_of(turn, self._chat) if self._asked.logprobs else None
        for part in last_chunks(self._heading, turn, self._sent, logprobs):
            await self._event(part)
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            await self._event(usage_chunk(self._heading, turn))

    async def _event(self, value: object) -> None:
        response = await self._begun()
        await response.write(b"data: " + orjson.dumps(value) + b"\n\n")

    async def _begun(self) -> web.StreamResponse:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
            first = chunk(self._heading, {"role": "assistant", "content": ""})
            await self._response.write(b"data: " + orjson.dumps(first) + b"\n\n")
        return self._response


async def _in_session(session: ServedSession, work: Awaitable[CapturedTurn]) -> CapturedTurn:
    """Wait for a turn; when the session ends first, the request is refused as it would be now."""
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


@web.middleware
async def _refusing(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Errors in OpenAI's shape."""
    try:
        return await handler(request)
    except MillraceError as error:
        status, body = refusal(error)
        return json_answer(body, status)
    except web.HTTPException as error:
        kind = {"message": error.reason, "type": "invalid_request_error", "param": None, "code": None}
        return json_answer({"error": kind}, error.status)


def _policy_of(model: str, captured: CapturedSession) -> str:
    if model == DEFAULT_MODEL and captured.default_policy is not None:
        return captured.default_policy
    if model not in captured.policies:
        raise UnknownPolicyError(
            f"no model {model!r} here; there is {', '.join(captured.policies)}, and {DEFAULT_MODEL!r} for the one that "
            "workflow.settings.policy names",
            param="model",
        )
    return model


def _plain(messages: tuple[Any, ...]) -> list[Message]:
    return [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is no UTF-8: {error}") from None
