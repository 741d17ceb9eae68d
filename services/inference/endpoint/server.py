"""The endpoint's routes over aiohttp.

    POST /v1/chat/completions      POST /v1/responses    /v1/responses/input_tokens      GET /v1/models
                                   GET /v1/responses/ID
    POST /v1/rewards               POST /v1/messages     /v1/messages/count_tokens       GET /v1/models/NAME

Every request names its session, in the header ``X-Rollmill-Session`` or ``X-Session-ID`` or as its API key, and has access
to no other. A session lives as long as its rollout. A disconnected client's generation is cancelled. In a run with keys
the routes are https, and an agent's session text also has its access token (``access``).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.aio import ended
from services.common.config.processes import EndpointConfig
from services.common.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    RollmillError,
    UnknownPolicyError,
)
from services.common.http import Listener, json_answer
from services.common.net import hosts
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.keys import Role
from services.common.telemetry.logs import reach_directly
from services.common.text.chat import Message
from services.common.text.tools import OPEN
from services.inference.endpoint.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, AnswerWriter
from services.inference.endpoint.forms import Dialect, Form, Refusal, UnknownSessionError, known
from services.inference.workflows.agents import (
    DEFAULT_MODEL,
    CapturedSession,
    CapturedTurn,
    IncrementalText,
    Located,
    Thread,
    settled,
)

# --- Creates the URL and session text of an agent, and reads the session from its requests.


SESSION_HEADER = "X-Rollmill-Session"
SESSION_HEADERS = (SESSION_HEADER, "X-Session-ID")
KEY_HEADERS = ("X-Api-Key", "Authorization")
CA_VARIABLE = "SSL_CERT_FILE"  # trusted authorities; read by OpenSSL and httpx, and so by the client `openai`
BODY_BYTES = 16 << 20  # of the largest request
_BETWEEN = "~"  # a character that no token and no session has
_BEARER = "Bearer "


def shown_sessions(request: web.Request) -> tuple[list[str], list[str]]:
    """The sessions that a request names in headers for sessions, and in those for API keys."""
    in_headers, in_keys = (
        [_plain(given).rpartition(_BETWEEN)[2] for name in names if (given := request.headers.get(name)) is not None]
        for names in (SESSION_HEADERS, KEY_HEADERS)
    )
    return in_headers, in_keys


def shown_token(request: web.Request) -> str | None:
    """The token that a request brings, with the session or by itself, as a header ``Bearer TOKEN``."""
    for name in (*SESSION_HEADERS, *KEY_HEADERS):
        token, between, _ = _plain(request.headers.get(name, "")).rpartition(_BETWEEN)
        if between:
            return _BEARER + token
    return request.headers.get("Authorization")


def _plain(header: str) -> str:
    return header.removeprefix(_BEARER).strip()


def base_url(host: str, port: int, *, secure: bool) -> str:
    """The endpoint's URL for agents on this machine."""
    host = host.strip("[]")
    try:
        if ip_address(host).is_unspecified:  # a wildcard bind includes loopback
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass  # a name
    return f"{'https' if secure else 'http'}://{hosts.address(host, port)}/v1"


def trust(who: Identity) -> None:
    """Add the run's authority to the trusted authorities of this process and its child processes."""
    trusted = os.environ.get(CA_VARIABLE) or ssl.get_default_verify_paths().cafile
    try:
        others = Path(trusted).read_bytes() if trusted else b""
    except OSError as error:
        raise ConfigError(f"{CA_VARIABLE} is {trusted}: {error.strerror}") from None
    if who.bundle.ca in others:
        return
    with tempfile.NamedTemporaryFile(prefix="rollmill-trust-", suffix=".pem", delete=False) as file:
        file.write(others.rstrip() + b"\n" + who.bundle.ca)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ[CA_VARIABLE] = file.name


# --- Reads the body of a request: an object with a list of items, such as ``messages``, among its fields.


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(body: bytes, name: str) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """All fields but the items, and the items of ``name``; a text is one item.

    Raises ``InvalidRequestError`` for another body. Whole numbers of any size stay exact: they are arguments of calls.
    """

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs) and [key for key, _ in pairs].count(name) > 1:
            raise InvalidRequestError(f"the body has {name} twice", param=name)
        return fields

    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is no UTF-8: {error}") from None
    try:
        fields = json.loads(text, object_pairs_hook=read)
        if _SURROGATE.search(text):
            json.dumps(fields, ensure_ascii=False).encode()  # raises for a half of a pair
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body is no JSON object but {type(fields).__name__}")
    if name not in fields:
        raise InvalidRequestError(f"{name} is missing", param=name)
    items = fields.pop(name)
    if not isinstance(items, str | list):
        raise InvalidRequestError(f"{name} is no JSON list or text but {type(items).__name__}", param=name)
    return fields, [items] if isinstance(items, str) else items


# --- Captured sessions as the endpoint serves them: finds the thread of a request, and the answers that requests name.


class RewardTold(BaseModel):
    """The body of ``POST /v1/rewards``. ``id``: of an answer; left out, the reward is the rollout's."""

    model_config = ConfigDict(extra="forbid")

    reward: float = Field(allow_inf_nan=False)
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that was read. ``locate`` finds its thread when the turn begins."""

    form: Form
    preface: tuple[Message, ...]
    locate: Callable[[], Located]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continued:
    """An answer that a request may continue: the thread, its messages up to and with the answer, and their preface."""

    thread: Thread
    num_messages: int
    preface: tuple[Message, ...]


class ServedSession:
    """A captured session with its running requests and its answers."""

    def __init__(self, captured: CapturedSession) -> None:
        self.captured = captured
        self.running: set[asyncio.Task[Any]] = set()
        self._answered: dict[str, _Continued] = {}
        self._stored: dict[str, dict[str, Any]] = {}  # bodies of answers by id

    def read(self, body: bytes, dialect: Dialect) -> Asked:
        given, items = read_body(body, dialect.items)
        form = dialect.form_of(given)
        form.policy = self._policy_of(form.model)
        preface: tuple[Message, ...] = () if form.system is None else ({"role": "system", "content": form.system},)
        new = dialect.read_items(items)

        def locate() -> Located:
            before: Sequence[Message] = ()
            if form.previous is not None:  # up to and with that answer, without its preface: instructions are told anew
                found = self._answer(form.previous, "previous_response_id", "previous_response_not_found")
                before = found.thread.messages[len(found.preface) : found.num_messages]
            return self.captured.locate(form, [*preface, *before, *new])

        return Asked(form=form, preface=preface, locate=locate)

    def answered(self, answer_id: str, asked: Asked, turn: CapturedTurn) -> None:
        """Remember an answer, which later requests may name."""
        self._answered[answer_id] = _Continued(
            thread=turn.thread, num_messages=turn.num_messages, preface=asked.preface
        )

    def store(self, writer: AnswerWriter) -> None:
        """Keep the body of a finished answer where its dialect and its request want that."""
        if (body := writer.stored()) is not None:
            self._stored[writer.id] = body

    def stored(self, answer_id: str) -> dict[str, Any]:
        """The body of an answer; raises ``NotFoundError`` for one that is not kept."""
        if answer_id not in self._stored:
            raise NotFoundError(
                f"no response {answer_id!r} here: this session made none of this id, or its request had store: false",
                param="response_id",
                code="response_not_found",
            )
        return self._stored[answer_id]

    def give_reward(self, told: RewardTold) -> None:
        """Set the reward of the sequence that has an answer, or of the rollout. The last one told counts."""
        if told.id is None:
            self.captured.reward = told.reward
        else:
            self._answer(told.id, "id", "answer_not_found").thread.reward = told.reward

    def _answer(self, answer_id: str, param: str, code: str) -> _Continued:
        found = self._answered.get(answer_id)
        if found is None:
            raise NotFoundError(f"{param} is {answer_id!r}; this session has no such answer", param=param, code=code)
        return found

    def _policy_of(self, model: str) -> str:
        captured = self.captured
        if model == DEFAULT_MODEL and captured.default_policy is not None:
            return captured.default_policy
        if model not in captured.policies:
            raise UnknownPolicyError(
                f"no model {model!r} here; there is {', '.join(captured.policies)}, and {DEFAULT_MODEL!r} for the one that "
                "workflow.settings.policy names",
                param="model",
            )
        return model


def model_told(name: str) -> dict[str, Any]:
    """A policy as a model, with the fields of OpenAI's and of Anthropic's clients."""
    ours = {"id": name, "object": "model", "created": 0, "owned_by": "rollmill"}
    return {**ours, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models_told(names: Iterable[str]) -> dict[str, Any]:
    data = [model_told(name) for name in names]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"has_more": False}
    return {"object": "list", "data": data, **page}


# --- Sends one answer as server-sent events while its turn is taken.


class Stream:
    """``send`` once."""

    def __init__(self, request: web.Request, session: ServedSession, asked: Asked, writer: AnswerWriter) -> None:
        self._request = request
        self._session = session
        self._asked = asked
        self._writer = writer
        self._held = (*asked.form.stop, *((OPEN,) if asked.form.reads_calls else ()))
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
        turn_task = asyncio.ensure_future(captured.take_turn(asked.form, asked.locate, on_token))
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


log = structlog.get_logger(__name__)
_PREFIXES = ("/v1", "/v1/v1")
"""Anthropic's client adds ``/v1`` to its base URL, and an agent is given one URL for all clients."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """``start`` serves, ``stop`` ends; an ``Endpoint`` of workflows meanwhile. Raises ``ConfigError`` for a bad bind."""

    def __init__(self, config: EndpointConfig, host: str, *, setting: str) -> None:
        """``setting`` is the port's path in the recipe."""
        assert config.port is not None
        self._host = host
        self._sessions: dict[str, ServedSession] = {}
        application = web.Application(client_max_size=BODY_BYTES, middlewares=[_refusing])
        application.add_routes(self._routes())
        self._listener = Listener(
            application,
            host,
            config.port,
            name="the endpoint",
            setting=setting,
            group="endpoint",
            leaving_cancels=True,
            refuse=_refused_by_the_listener,
            shown=shown_token,
        )
        self._who = identity.current()
        # The inference service's bundle holds the agents' identity.
        self._agent = None if self._who is None else identity.load(self._who.folder, Role.AGENT)

    @property
    def base_url(self) -> str:
        return base_url(self._host, self._listener.port, secure=self._listener.is_secure)

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of every route."""
        return self._listener.routes

    async def start(self) -> int:
        """Start serving; returns the port."""
        if self._who is not None:
            trust(self._who)
        reach_directly(self._host.strip("[]"))
        return await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    @contextlib.contextmanager
    def opened(self, session: CapturedSession) -> Iterator[str]:
        """Serve a session under the id that this context yields; its end cancels the session's requests."""
        session_id = secrets.token_urlsafe(24)
        served = self._sessions[session_id] = ServedSession(session)
        try:
            yield session_id if self._agent is None else self._agent.bundle.token + _BETWEEN + session_id
        finally:
            del self._sessions[session_id]
            for task in served.running:
                task.cancel()

    # -- routes -------------------------------------------------------------------------------------------------

    def _routes(self) -> Iterator[web.RouteDef]:
        for prefix in _PREFIXES:
            yield web.get(f"{prefix}/models", self._models)
            yield web.get(f"{prefix}/models/{{name}}", self._model)
            yield web.post(f"{prefix}/rewards", self._rewards)
            for dialect in DIALECTS if prefix == _PREFIXES[0] else (MESSAGES,):
                yield web.post(prefix + dialect.path, self._answering(dialect))
                if dialect is RESPONSES:
                    yield web.get(prefix + dialect.path + "/{id}", self._retrieve)
                if dialect.counts is not None:
                    yield web.post(prefix + dialect.path + dialect.counts, self._counting(dialect))

    async def _models(self, request: web.Request) -> web.Response:
        return json_answer(models_told(self._session(request).captured.policies))

    async def _model(self, request: web.Request) -> web.Response:
        name, policies = request.match_info["name"], self._session(request).captured.policies
        if name not in policies:
            raise UnknownPolicyError(f"no model {name!r} here; there is {', '.join(policies)}", param="model")
        return json_answer(model_told(name))

    async def _retrieve(self, request: web.Request) -> web.Response:
        return json_answer(self._session(request).stored(request.match_info["id"]))

    async def _rewards(self, request: web.Request) -> web.Response:
        session = self._session(request)
        try:
            told = RewardTold.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from None
        session.give_reward(told)
        return json_answer(told.model_dump())

    def _answering(self, dialect: Dialect) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            asked = session.read(await request.read(), dialect)
            captured, policy = session.captured, asked.form.policy
            chat = captured.policies[policy].chat
            writer = dialect.writer(asked.form, policy, chat, thinks=captured.thinks(policy))
            if asked.form.stream:
                return await Stream(request, session, asked, writer).send()
            turn = await in_session(session, captured.take_turn(asked.form, asked.locate))
            session.answered(writer.id, asked, turn)
            body = writer.whole(turn)
            session.store(writer)
            return json_answer(body)

        return handler

    def _counting(self, dialect: Dialect) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            asked = session.read(await request.read(), dialect)
            return json_answer(dialect.counted(session.captured.count(asked.form, asked.locate)))

        return handler

    def _session(self, request: web.Request) -> ServedSession:
        """The session that a header names, else the API key. The header of one rollout and the key of another are refused:
        tokens would be trained with another rollout's reward."""
        in_headers, in_keys = shown_sessions(request)
        live = {name for name in (*in_headers, *in_keys) if name in self._sessions}
        if len(live) > 1:
            raise PermissionDeniedError(
                "the request names the sessions of two rollouts, in its headers and as its API key: send the session that the "
                "agent of this rollout was given",
                code="session_conflict",
            )
        if not live or (in_headers and in_headers[0] not in live):
            raise UnknownSessionError(
                f"no rollout has this session, or the rollout is over: send the session that the agent was given, in the header "
                f"{SESSION_HEADER} or X-Session-ID, or as the API key"
            )
        return self._sessions[live.pop()]


# -- refusals -----------------------------------------------------------------------------------------------------------


def _dialect_of(request: web.BaseRequest) -> Dialect:
    """The dialect in which a request is refused: by its path, and of Anthropic's client by its header."""
    if "anthropic-version" in request.headers:
        return MESSAGES
    of_path = (
        dialect for dialect in DIALECTS for prefix in _PREFIXES if request.path.startswith(prefix + dialect.path)
    )
    return next(of_path, CHAT)


def _refused_by_the_listener(request: web.BaseRequest, error: RollmillError, status: int) -> web.StreamResponse:
    return json_answer(_dialect_of(request).refused(error)[1], status)


@web.middleware
async def _refusing(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Errors in the shape of the dialect."""
    dialect = _dialect_of(request)
    try:
        return await handler(request)
    except web.HTTPException as error:
        refusal = Refusal(
            status=error.status, code=error.reason.lower().replace(" ", "_"), message=_told(request, error)
        )
        return json_answer(dialect.refusal(refusal)[1], error.status)
    except ConnectionResetError:
        raise  # the client has left
    except Exception as error:  # noqa: BLE001 - a script of the user's may raise anything, and the agent shows the reason
        status, body = dialect.refused(error)
        return json_answer(body, status)


def _told(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"{error.text}: the bound is {BODY_BYTES} bytes: cut what the agent sends"
    if isinstance(error, web.HTTPNotFound):
        served = ", ".join(_PREFIXES[0] + dialect.path for dialect in DIALECTS)
        return f"{request.path} is not served; there is {served} and /v1/models"
    return error.reason
