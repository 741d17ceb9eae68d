"""Defines a dialect of the endpoint: it reads requests, and writes answers, events and errors.

    body --fields, items--> DialectRequest, plain messages --> turn --> AnswerWriter --> one body, or events

A dialect knows text and JSON, not sessions, threads or tokens.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import structlog
from pydantic import BaseModel, Field, ValidationError

from services.common.errors import (
    CapacityError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    RollmillError,
    UnauthenticatedError,
    UnknownPolicyError,
)
from services.common.text.chat import Chat, Message
from services.common.text.tool_calls import cut_text
from services.common.user_code import place_of_error, told
from services.inference.endpoint.dialects.tools import Tools
from services.inference.workflows.agents.turns import DEFAULT_MODEL, CapturedTurn, TurnRequest

log = structlog.get_logger(__name__)

Fields = TypeVar("Fields", bound=BaseModel)


class UnknownSessionError(NotFoundError):
    """No rollout has this session, or its rollout is over."""


class DialectRequest(BaseModel, ABC):
    """All fields of a request but its items (messages, input).

    Fields without effect here (``user``, ``metadata``, ``store``, ...) are ignored; fields that request an unsupported
    feature are refused by name, so that no run trains under settings that were not requested.
    """

    model: str = DEFAULT_MODEL
    stream: bool | None = None
    tools: Tools = Field(default=None, max_length=512)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1 are off; a field of Anthropic's alone
    min_p: float | None = Field(default=None, ge=0, lt=1)  # a field of none

    def preface(self) -> list[Message]:
        """Messages before the items, such as a system prompt in a field of its own."""
        return []

    def previous(self) -> str | None:
        """The id of an answer after whose conversation the items follow."""
        return None

    @abstractmethod
    def ask(self, policy: str) -> TurnRequest: ...

    def _ask(self, policy: str, **fields: Any) -> TurnRequest:
        return TurnRequest(
            policy=policy,
            tools=self.tools or (),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            **fields,
        )


class AnswerWriter(ABC):
    """Writes one answer: ``whole``, or ``begin``, any number of ``text``, then ``finish`` or ``fail``."""

    prefix = "answer"

    def __init__(self, request: Any, policy: str, chat: Chat, *, thinks: bool) -> None:
        """``thinks``: the policy's text begins within a thought."""
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.request = request
        self.policy = policy
        self.chat = chat
        self.thinks = thinks

    @abstractmethod
    def whole(self, turn: CapturedTurn) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Events before the first token."""

    @abstractmethod
    def text(self, settled: str) -> Iterable[bytes]:
        """Events of the text so far, which only grows, and is no part of a call or a stop."""

    @abstractmethod
    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        """Events of all that was not sent, and of the end."""

    def stored(self) -> dict[str, Any] | None:
        """The body that the client may fetch by its id, once the answer is written; None for one that is not kept."""
        return None

    @abstractmethod
    def fail(self, error: RollmillError) -> Iterable[bytes]:
        """Events of a turn that failed after the first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLimits:
    """Bounds of what a request's items hold."""

    tool_result_chars: int

    def tool_result(self, text: str) -> str:
        return cut_text(text, self.tool_result_chars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error for a client: only transient errors have a status that clients retry."""

    status: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """``items`` names the field with the list that grows with a conversation; ``counts``: the path, behind the dialect's,
    that counts tokens, and ``counted`` the body of its answer."""

    path: str
    items: str
    request: type[DialectRequest]
    read_items: Callable[[Sequence[Any], ItemLimits], list[Message]]
    writer: type[AnswerWriter]
    refusal: Callable[[Refusal], tuple[int, dict[str, Any]]]
    counts: str | None = None
    counted: Callable[[int], dict[str, Any]] = lambda count: {"input_tokens": count}

    def refused(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and body of an error."""
        return self.refusal(refusal_of(known(error)))


def validated(kind: type[Fields], given: Any) -> Fields:
    """Raises ``InvalidRequestError``, which names the first wrong field."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from None


def refusal_of(error: RollmillError) -> Refusal:
    status, code = 500, error.reason.lower()
    if isinstance(error, UnknownSessionError):
        status, code = 401, "unknown_session"
    elif isinstance(error, UnauthenticatedError):
        status = 401
    elif isinstance(error, PermissionDeniedError):
        status = 403
    elif isinstance(error, UnknownPolicyError):
        status, code = 404, "model_not_found"
    elif isinstance(error, NotFoundError):
        status = 404
    elif isinstance(error, PromptTooLongError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, InvalidRequestError):
        status = 400
    elif isinstance(error, (CapacityError, InfrastructureError)):
        status = 503
    return Refusal(
        status=status, code=error.metadata.get("code", code), message=error.message, param=error.metadata.get("param")
    )


def known(error: Exception) -> RollmillError:
    """The error as the agent is told of it: one of the user's code, such as a script, with its place."""
    if isinstance(error, RollmillError):
        return error
    log.error("endpoint.failed", exc_info=error)
    return RollmillError(f"{place_of_error(error)}{told(error)}")


def check_stops(stops: Sequence[str]) -> list[str]:
    """For validators. Raises ``ValueError``."""
    if len(stops) > 16 or any(not 0 < len(stop) <= 256 for stop in stops):
        raise ValueError("at most 16 texts of 1 to 256 characters")
    return list(stops)


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def object_at(value: Any, where: str) -> Mapping[str, Any]:
    """``value``, which must be an object. Raises ``InvalidRequestError``."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object")
    return value
