"""OpenAI's Responses: writes answers and their events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from services.common.errors import RollmillError
from services.common.text.chat import Chat
from services.inference.endpoint.dialects.base import event, refusal_of
from services.inference.endpoint.dialects.blocks import BlockWriter, Kind, texts_of
from services.inference.workflows.agents.chat_messages import Call
from services.inference.workflows.agents.turns import CapturedTurn

_DELTA = {Kind.THOUGHT: "response.reasoning_text", Kind.TEXT: "response.output_text"}
Json = dict[str, Any]


class ResponsesWriter(BlockWriter):
    """Each block is an output item; the events of a text are those of its item and of its only part."""

    prefix = "resp_"

    def __init__(self, request: Any, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(request, policy, chat, thinks=thinks)
        self._created = time.time()
        self._sequence = 0
        self._output: list[Json] = []  # finished items
        self._whole: Json | None = None  # the finished response

    def whole(self, turn: CapturedTurn) -> Json:
        for kind, text in texts_of(turn.answer):
            self._output.append(self._item(kind, text))
            self.num_blocks += 1
        for call in turn.answer.calls:
            self._output.append(self._call(call))
            self.num_blocks += 1
        return self._finished(turn)

    def begin(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        refusal = refusal_of(error)
        told = {"code": "server_error", "message": refusal.message}
        yield self._event("response.failed", response=self._response("failed", error=told))

    def begin_block(self, kind: Kind) -> Iterable[bytes]:
        item = {**self._item(kind, "", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=self.num_blocks, item=item)
        yield self._event("response.content_part.added", **self._of_part(kind), part=_part(kind, ""))

    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]:
        logprobs: Json = {"logprobs": []} if kind is Kind.TEXT else {}
        yield self._event(f"{_DELTA[kind]}.delta", **self._of_part(kind), delta=text, **logprobs)

    def end_block(self, kind: Kind, text: str) -> Iterable[bytes]:
        logprobs: Json = {"logprobs": []} if kind is Kind.TEXT else {}
        yield self._event(f"{_DELTA[kind]}.done", **self._of_part(kind), text=text, **logprobs)
        yield self._event("response.content_part.done", **self._of_part(kind), part=_part(kind, text))
        yield self._done(self._item(kind, text))

    def write_call(self, call: Call) -> Iterable[bytes]:
        item = self._call(call)
        about = {"item_id": item["id"], "output_index": self.num_blocks}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self.num_blocks, item=begun)
        yield self._event("response.function_call_arguments.delta", **about, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **about, arguments=call.arguments)
        yield self._done(item)

    def end(self, turn: CapturedTurn) -> Iterable[bytes]:
        response = self._finished(turn)
        yield self._event(f"response.{response['status']}", response=response)

    def _done(self, item: Json) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=self.num_blocks, item=item)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": name, "sequence_number": self._sequence - 1, **fields}, name)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.id.removeprefix(self.prefix)}_{self.num_blocks}"

    def _of_part(self, kind: Kind) -> Json:
        return {"item_id": self._item(kind, "")["id"], "output_index": self.num_blocks, "content_index": 0}

    def _item(self, kind: Kind, text: str, status: str = "completed") -> Json:
        if kind is Kind.THOUGHT:
            fields: Json = {"id": self._id("rs"), "type": "reasoning", "summary": []}
        else:
            fields = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        return {**fields, "status": status, "content": [_part(kind, text)]}

    def _call(self, call: Call) -> Json:
        told = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": self._id("fc"), "type": "function_call", **told, "status": "completed"}

    def _finished(self, turn: CapturedTurn) -> Json:
        read, sampled = turn.num_prompt_tokens, turn.num_sampled_tokens
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }
        if turn.ended:
            self._whole = self._response("completed", usage=usage)
        else:
            incomplete = {"reason": "max_output_tokens"}
            self._whole = self._response("incomplete", usage=usage, incomplete_details=incomplete)
        return self._whole

    def stored(self) -> Json | None:
        return None if self.request.store is False else self._whole

    def _response(self, status: str, **fields: Any) -> Json:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.policy,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_told_tool(tool["function"]) for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _part(kind: Kind, text: str) -> Json:
    if kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _told_tool(function: Mapping[str, Any]) -> Json:
    return {"type": "function", "parameters": None, "strict": False, **function}
