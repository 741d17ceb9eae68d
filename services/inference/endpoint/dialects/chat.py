"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from services.common.errors import InvalidRequestError, RollmillError
from services.common.text.chat import Chat, Message
from services.common.text.special_text import joined_parts
from services.inference.endpoint.dialects.base import (
    AnswerWriter,
    Dialect,
    DialectRequest,
    ItemLimits,
    Refusal,
    check_stops,
    event,
    object_at,
)
from services.inference.workflows.agents.chat_messages import Call, assistant_message, plain_arguments, tool_message
from services.inference.workflows.agents.turns import CapturedTurn, TurnRequest

_ROLES = {"developer": "system"}  # the name in newer clients
_KNOWN = ("system", "user", "assistant", "tool")


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(DialectRequest):
    tool_choice: Literal["auto", "none"] | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
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
        return check_stops([value] if isinstance(value, str) else list(value or ()))

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError("answers are text; write {'type': 'text'} or remove the field")
        return value

    def ask(self, policy: str) -> TurnRequest:
        return self._ask(
            policy,
            read_calls=self.tool_choice != "none",
            stop=tuple(self.stop or ()),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
        )


# -- messages -------------------------------------------------------------------------------------------------------


def read_messages(messages: Sequence[Any], limits: ItemLimits) -> list[Message]:
    return [_plain(message, f"messages[{i}]", limits) for i, message in enumerate(messages)]


def _plain(message: Any, where: str, limits: ItemLimits) -> Message:
    message = object_at(message, where)
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    if role not in _KNOWN:
        raise InvalidRequestError(f"{where}.role is {role!r}; must be one of {', '.join(_KNOWN)}")
    content = text_of(message.get("content"), f"{where}.content")
    if role == "assistant":
        told = message.get("tool_calls") or []
        if not isinstance(told, list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list")
        return assistant_message(content, [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(told)])
    if role == "tool":
        return tool_message(str(message.get("tool_call_id", "")), limits.tool_result(content))
    return {"role": role, "content": content}


def text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else joined_parts(content, where)


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} needs function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}.function.arguments must be JSON as text")
    return Call(id=str(call.get("id", "")), name=function["name"], arguments=plain_arguments(arguments))


# -- answers --------------------------------------------------------------------------------------------------------


class ChatWriter(AnswerWriter):
    """The thought stays in the text of an answer: clients of chat completions read and return one text."""

    prefix = "chatcmpl-"
    request: ChatRequest

    def __init__(self, request: ChatRequest, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(request, policy, chat, thinks=thinks)
        self._created = int(time.time())
        self._sent = ""

    def whole(self, turn: CapturedTurn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.answer.content}
        if turn.answer.calls:
            message |= {"content": turn.answer.content or None, "tool_calls": _told_calls(turn)}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(turn),
            "logprobs": self._logprobs(turn),
        }
        return {**self._fields("chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def begin(self) -> Iterable[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, settled: str) -> Iterable[bytes]:
        if len(settled) > len(self._sent):
            yield self._chunk({"content": settled[len(self._sent) :]})
            self._sent = settled

    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        content = turn.answer.content
        # With calls, space at the end of the text may have been sent before the cut was known.
        if content.startswith(self._sent):
            yield from self.text(content)
        if turn.answer.calls:
            yield self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(_told_calls(turn))]})
        yield self._chunk({}, finish_reason=_finish_reason(turn), logprobs=self._logprobs(turn))
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield event({**self._fields("chat.completion.chunk"), "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        yield event(CHAT.refused(error)[1])
        yield b"data: [DONE]\n\n"

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.policy}

    def _chunk(self, delta: Mapping[str, Any], **choice: Any) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}
        return event({**self._fields("chat.completion.chunk"), "choices": [one]})

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        """Log-probabilities of every sampled token under its sampling distribution."""
        if not self.request.logprobs:
            return None
        entries = []
        for segment in turn.generation.segments:
            for token, value in zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True):
                text = self.chat.decode([token])
                entries.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def _told_calls(turn: CapturedTurn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.answer.calls
    ]


def _finish_reason(turn: CapturedTurn) -> str:
    return "length" if not turn.ended else "tool_calls" if turn.answer.calls else "stop"


def _usage(turn: CapturedTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": turn.num_sampled_tokens,
        "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
    }


def openai_refusal(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    """An error for OpenAI's clients."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    told = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return refusal.status, {"error": told}


CHAT = Dialect(
    path="/chat/completions",
    items="messages",
    request=ChatRequest,
    read_items=read_messages,
    writer=ChatWriter,
    refusal=openai_refusal,
)
