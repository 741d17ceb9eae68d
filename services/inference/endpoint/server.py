"""The endpoint's routes over aiohttp.

    POST /v1/chat/completions      POST /v1/responses    /v1/responses/input_tokens      GET /v1/models
                                   GET /v1/responses/ID
    POST /v1/rewards               POST /v1/messages     /v1/messages/count_tokens       GET /v1/models/NAME

Every request names its session, in the header ``X-Rollmill-Session`` or ``X-Session-ID`` or as its API key, and has access
to no other. A session lives as long as its rollout. A disconnected client's generation is cancelled. In a run with keys
the routes are https, and an agent's session text also has its access token (``access``).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator

import orjson
import structlog
from aiohttp import web

from services.common.config.processes.services import EndpointConfig
from services.common.errors import InvalidRequestError, PermissionDeniedError, RollmillError, UnknownPolicyError
from services.common.http.listener import Listener
from services.common.http.origin import json_answer
from services.common.security import identity
from services.common.system.surroundings import reach_directly
from services.inference.endpoint.access import (
    SESSION_HEADER,
    agent_of,
    base_url,
    shown_sessions,
    shown_token,
    trust,
    with_token,
)
from services.inference.endpoint.dialects.base import Dialect, ItemLimits, Refusal, UnknownSessionError, validated
from services.inference.endpoint.dialects.chat import CHAT
from services.inference.endpoint.dialects.messages import MESSAGES
from services.inference.endpoint.dialects.responses import RESPONSES
from services.inference.endpoint.sessions import RewardTold, ServedSession, model_told, models_told
from services.inference.endpoint.streams import Stream, in_session
from services.inference.workflows.agents.captured import CapturedSession

log = structlog.get_logger(__name__)

DIALECTS = (CHAT, RESPONSES, MESSAGES)
_PREFIXES = ("/v1", "/v1/v1")
"""Anthropic's client adds ``/v1`` to its base URL, and an agent is given one URL for all clients."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """``start`` serves, ``stop`` ends; an ``Endpoint`` of workflows meanwhile. Raises ``ConfigError`` for a bad bind."""

    def __init__(self, config: EndpointConfig, host: str, *, setting: str) -> None:
        """``setting`` is the port's path in the recipe."""
        assert config.port is not None
        self._host = host
        self._limits = ItemLimits(tool_result_chars=config.tool_result_chars)
        self._sessions: dict[str, ServedSession] = {}
        application = web.Application(client_max_size=config.body_bytes, middlewares=[_refusing])
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
        self._agent = None if self._who is None else agent_of(self._who)

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
        served = self._sessions[session_id] = ServedSession(session, self._limits)
        try:
            yield session_id if self._agent is None else with_token(session_id, self._agent)
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
            given = orjson.loads(await request.read())
        except ValueError as error:
            raise InvalidRequestError(f"the body is no JSON that can be read: {error}") from None
        told = validated(RewardTold, given)
        session.give_reward(told)
        return json_answer(told.model_dump())

    def _answering(self, dialect: Dialect) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            asked = session.read(await request.read(), dialect)
            captured, policy = session.captured, asked.turn.policy
            chat = captured.policies[policy].chat
            writer = dialect.writer(asked.fields, policy, chat, thinks=captured.thinks(policy))
            if asked.fields.stream:
                return await Stream(request, session, asked, writer).send()
            turn = await in_session(session, captured.take_turn(asked.turn, asked.locate))
            session.answered(writer.id, asked, turn)
            body = writer.whole(turn)
            session.store(writer)
            return json_answer(body)

        return handler

    def _counting(self, dialect: Dialect) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            asked = session.read(await request.read(), dialect)
            return json_answer(dialect.counted(session.captured.count(asked.turn, asked.locate)))

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
        return f"{error.text}: cut what the agent sends, or raise inference.<name>.endpoint.body_bytes"
    if isinstance(error, web.HTTPNotFound):
        served = ", ".join(_PREFIXES[0] + dialect.path for dialect in DIALECTS)
        return f"{request.path} is not served; there is {served} and /v1/models"
    return error.reason
