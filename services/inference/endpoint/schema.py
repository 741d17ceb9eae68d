"""What of OpenAI's chat requests is understood, what is refused, and the shape of refusals.

Fields that change nothing here (``user``, ``metadata``, ``store``, ...) are ignored; those that ask for something that is
not done are refused by name, so that nobody trains on what he did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from services.common.errors import (
    CapacityError,
    InfrastructureError,
    InvalidRequestError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    UnauthenticatedError,
    UnknownPolicyError,
)
from services.inference.workflows.captured import Ask

DEFAULT_MODEL = "default"


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """All fields but ``messages``."""

    model: str = DEFAULT_MODEL
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=512)
    tool_choice: Literal["auto", "none"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # with min_p no field of OpenAI's; 0 and -1 are off
    min_p: float | None = Field(default=None, ge=0, lt=1)
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    response_format: dict[str, Any] | None = None
    functions: None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else list(value or ())
        if len(stops) > 16 or any(not 0 < len(stop) <= 256 for stop in stops):
            raise ValueError("at most 16 texts of 1 to 256 characters")
        return stops

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError("answers are text; write {'type': 'text'} or leave it out")
        return value

    def ask(self, policy: str) -> Ask:
        return Ask(
            policy=policy,
            tools=self.tools or (),
            read_calls=self.tool_choice != "none",
            stop=tuple(self.stop or ()),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            seed=self.seed,
        )


def read_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Raises ``InvalidRequestError`` that names the first field which is wrong."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from None


class UnknownSessionError(NotFoundError):
    """No rollout has this session, or its rollout is over."""


def refusal(error: MillraceError) -> tuple[int, dict[str, Any]]:
    """Status and body, as OpenAI's clients read them. Statuses that they repeat by themselves are those that may heal."""
    status, code = 500, error.reason.lower()
    if isinstance(error, UnknownSessionError):
        status, code = 401, "unknown_session"
    elif isinstance(error, UnauthenticatedError):
        status = 401
    elif isinstance(error, PermissionDeniedError):
        status = 403
    elif isinstance(error, UnknownPolicyError):
        status, code = 404, "model_not_found"
    elif isinstance(error, PromptTooLongError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, InvalidRequestError):
        status = 400
    elif isinstance(error, (CapacityError, InfrastructureError)):
        status = 503
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.metadata.get("param"),
            "code": error.metadata.get("code", code),
        }
    }
