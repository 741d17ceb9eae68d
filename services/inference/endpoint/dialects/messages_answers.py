"""Anthropic's Messages: writes answers, their events, and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from services.common.errors import RollmillError
from services.inference.endpoint.dialects.base import Refusal, event, refusal_of
from services.inference.endpoint.dialects.blocks import BlockWriter, Kind, texts_of
from services.inference.workflows.agents.chat_messages import Call
from services.inference.workflows.agents.turns import CapturedTurn

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
