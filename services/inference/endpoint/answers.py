"""Answers in OpenAI's shapes: a whole completion, and the chunks of a streamed one. Pure functions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.chat import Chat
from services.inference.workflows.captured import CapturedTurn


@dataclass(frozen=True, slots=True)
class Heading:
    """What all parts of one answer say."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def completion(heading: Heading, turn: CapturedTurn, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    choice = {"index": 0, "message": turn.message, "finish_reason": turn.finish_reason, "logprobs": logprobs}
    return {**heading.fields("chat.completion"), "choices": [choice], "usage": usage(turn)}


def chunk(heading: Heading, delta: Mapping[str, Any], **choice: Any) -> dict[str, Any]:
    one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}
    return {**heading.fields("chat.completion.chunk"), "choices": [one]}


def last_chunks(
    heading: Heading, turn: CapturedTurn, sent: str, logprobs: Mapping[str, Any] | None
) -> Iterable[dict[str, Any]]:
    """What was held back of the text, the calls, and the end."""
    content = turn.message.get("content") or ""
    calls = turn.message.get("tool_calls")
    # With calls, space at the end of the text may have been sent before it was known to be cut.
    if content.startswith(sent) and len(content) > len(sent):
        yield chunk(heading, {"content": content[len(sent) :]})
    if calls:
        yield chunk(heading, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    yield chunk(heading, {}, finish_reason=turn.finish_reason, logprobs=logprobs)


def usage_chunk(heading: Heading, turn: CapturedTurn) -> dict[str, Any]:
    return {**heading.fields("chat.completion.chunk"), "choices": [], "usage": usage(turn)}


def usage(turn: CapturedTurn) -> dict[str, int]:
    sampled = sum(segment.num_tokens for segment in turn.generation.segments)
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.num_prompt_tokens + sampled,
    }


def logprobs_of(turn: CapturedTurn, chat: Chat) -> dict[str, Any]:
    """Of every sampled token, under the distribution that it was sampled from."""
    entries = []
    for segment in turn.generation.segments:
        for token, value in zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True):
            text = chat.decode([token])
            entries.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def models(names: Iterable[str]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "millrace"} for name in names],
    }
