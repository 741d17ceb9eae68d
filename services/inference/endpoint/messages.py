"""Anthropic's Messages: reads requests and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field, field_validator

from services.common.errors import InvalidRequestError, RollmillError
from services.common.text.chat import Message
from services.inference.endpoint.chat import (
    BlockWriter,
    Dialect,
    DialectRequest,
    ItemLimits,
    Kind,
    Refusal,
    check_stops,
    event,
    function_tool,
    object_at,
    refusal_of,
    texts_of,
)
from services.inference.workflows.agents import (
    Call,
    CapturedTurn,
    TurnRequest,
    apart_message,
    tool_message,
    written_arguments,
)

# --- Anthropic's Messages: writes answers, their events, and errors.


_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
Json = dict[str, Any]


class MessagesWriter(BlockWriter):
    prefix = "msg_"

    def whole(self, turn: CapturedTurn) -> Json:
        content = [self._block(kind, text) for kind, text in texts_of(turn.answer)]
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(call.arguments)}
            for call in turn.answer.calls
        ]
        return self._message([*content, *calls], _usage(turn), **_end(turn))

    def begin(self) -> Iterable[bytes]:
        # The size of the prompt is known when the turn begins, and told in `message_delta`.
        yield _event("message_start", message=self._message([], {"input_tokens": 0, "output_tokens": 0}))
        yield _event("ping")

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        yield event(anthropic_refusal(refusal_of(error))[1], "error")

    def begin_block(self, kind: Kind) -> Iterable[bytes]:
        block = self._block(kind, "") | ({"signature": ""} if kind is Kind.THOUGHT else {})
        yield _event("content_block_start", index=self.num_blocks, content_block=block)

    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]:
        if kind is Kind.THOUGHT:
            yield self._delta({"type": "thinking_delta", "thinking": text})
        else:
            yield self._delta({"type": "text_delta", "text": text})

    def end_block(self, kind: Kind, text: str) -> Iterable[bytes]:
        if kind is Kind.THOUGHT:
            yield self._delta({"type": "signature_delta", "signature": self.id})
        yield _event("content_block_stop", index=self.num_blocks)

    def write_call(self, call: Call) -> Iterable[bytes]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _event("content_block_start", index=self.num_blocks, content_block=block)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield _event("content_block_stop", index=self.num_blocks)

    def end(self, turn: CapturedTurn) -> Iterable[bytes]:
        yield _event("message_delta", delta=_end(turn), usage=_usage(turn))
        yield _event("message_stop")

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self.num_blocks, delta=delta)

    def _block(self, kind: Kind, text: str) -> Json:
        if kind is Kind.THOUGHT:  # clients that check for a signature return the block
            return {"type": "thinking", "thinking": text, "signature": self.id}
        return {"type": "text", "text": text}

    def _message(self, content: list[Json], usage: Json, **end: Any) -> Json:
        fields = {"id": self.id, "type": "message", "role": "assistant", "model": self.policy, "content": content}
        return {**fields, "stop_reason": None, "stop_sequence": None, **end, "usage": usage}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _end(turn: CapturedTurn) -> Json:
    reason = "end_turn"
    if not turn.ended:
        reason = "max_tokens"
    elif turn.answer.calls:
        reason = "tool_use"
    elif turn.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": turn.stop if reason == "stop_sequence" else None}


def _usage(turn: CapturedTurn) -> Json:
    return {
        "input_tokens": turn.num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": turn.num_sampled_tokens,
    }


def anthropic_refusal(refusal: Refusal) -> tuple[int, Json]:
    """An error for Anthropic's clients, which know a long prompt by the beginning of the message."""
    status = 529 if refusal.code == "capacity_exhausted" else refusal.status
    too_long = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
    error = {"type": _ERRORS.get(status, "api_error"), "message": too_long + refusal.message}
    return status, {"type": "error", "error": error, "request_id": None}


class ToolChoice(BaseModel):
    type: Literal["auto", "none"]


class MessagesRequest(DialectRequest):
    system: str | list[Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] | None = None
    tool_choice: ToolChoice | None = None
    output_config: dict[str, Any] | None = None
    container: None = None
    mcp_servers: list[Any] | None = Field(default=None, max_length=0)
    context_management: dict[str, Any] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _as_functions(cls, tools: Any) -> Any:
        return [_function(tool) for tool in tools] if isinstance(tools, list) else tools

    @field_validator("stop_sequences")
    @classmethod
    def _few_stops(cls, value: list[str] | None) -> list[str]:
        return check_stops(value or ())

    @field_validator("output_config")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if (value or {}).get("format") is not None:
            raise ValueError("answers are text; remove `format`")
        return value

    @field_validator("context_management")
    @classmethod
    def _no_edits(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        edits = (value or {}).get("edits") or []
        kinds = [edit.get("type") if isinstance(edit, Mapping) else edit for edit in edits]
        if refused := [kind for kind in kinds if not str(kind).startswith("clear_thinking_")]:
            raise ValueError(
                f"{refused[0]!r} would rewrite the history on the server, which keeps it as it was sampled"
            )
        return value

    def preface(self) -> list[Message]:
        if self.system is None:
            return []
        return [{"role": "system", "content": _text_of(self.system, "system")}]

    def ask(self, policy: str) -> TurnRequest:
        return self._ask(
            policy,
            read_calls=self.tool_choice is None or self.tool_choice.type != "none",
            stop=tuple(self.stop_sequences or ()),
            max_tokens=self.max_tokens,
        )


def _function(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        return tool
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


# -- messages -------------------------------------------------------------------------------------------------------


def read_messages(messages: Sequence[Any], limits: ItemLimits) -> list[Message]:
    plain: list[Message] = []
    for i, each in enumerate(messages):
        where = f"messages[{i}]"
        message = object_at(each, where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"{where}.role is {role!r}; must be user, assistant or system")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise InvalidRequestError(
                f"{where}.content is {type(content).__name__}; it must be text or a list of blocks"
            )
        told = [object_at(block, f"{where}.content[{k}]") for k, block in enumerate(blocks)]
        if role == "assistant":
            plain.append(_turn(told, f"{where}.content"))
        else:
            plain += _read_user(role, told, f"{where}.content", limits)
    return plain


def _turn(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    """A turn of the policy."""
    thought: str | None = None
    said = ""
    calls: list[Call] = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            said += _text_in(block, "text", f"{where}[{i}]")
        elif kind == "thinking":
            thought = (thought or "") + _text_in(block, "thinking", f"{where}[{i}]")
        elif kind == "tool_use":
            name = _text_in(block, "name", f"{where}[{i}]")
            given = object_at(block.get("input") or {}, f"{where}[{i}].input")
            calls.append(Call(id=str(block.get("id", "")), name=name, arguments=written_arguments(given)))
        elif kind != "redacted_thinking":
            raise _no_text(f"{where}[{i}]", kind, "text, thinking or tool_use")
    return apart_message(said, thought, calls)


def _read_user(role: str, blocks: Sequence[Mapping[str, Any]], where: str, limits: ItemLimits) -> list[Message]:
    """The results of tools are messages of their own, and the texts between them one each."""
    plain: list[Message] = []
    texts: list[str] = []

    def said() -> None:
        if texts:
            plain.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text_in(block, "text", f"{where}[{i}]"))
        elif kind == "tool_result" and role == "user":
            said()
            result = _text_of(block.get("content"), f"{where}[{i}].content")
            plain.append(tool_message(str(block.get("tool_use_id", "")), limits.tool_result(result)))
        else:
            raise _no_text(f"{where}[{i}]", kind, "text or tool_result")
    said()
    return plain or [{"role": role, "content": ""}]


def _text_of(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is {type(content).__name__}; it must be text or a list of blocks")
    texts = []
    for i, each in enumerate(content):
        block = object_at(each, f"{where}[{i}]")
        if block.get("type") != "text":
            raise _no_text(f"{where}[{i}]", block.get("type"), "text")
        texts.append(_text_in(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _text_in(block: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(text := block.get(key), str):
        raise InvalidRequestError(f"{where}.{key} is {type(text).__name__}; it must be text")
    return text


def _no_text(where: str, kind: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is of type {kind!r}; must be {wanted}: the policies read text alone", param=where
    )


MESSAGES = Dialect(
    path="/messages",
    items="messages",
    request=MessagesRequest,
    read_items=read_messages,
    writer=MessagesWriter,
    refusal=anthropic_refusal,
    counts="/count_tokens",
)
