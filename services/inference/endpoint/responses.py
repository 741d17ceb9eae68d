"""OpenAI's Responses: reads requests and their input items.

The items of one turn of the policy (a reasoning, a message, calls) are one message here. ``previous_response_id`` goes on
after an earlier answer of the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.errors import InvalidRequestError, RollmillError
from services.common.text.chat import Chat, Message
from services.inference.endpoint.chat import (
    BlockWriter,
    Dialect,
    DialectRequest,
    ItemLimits,
    Kind,
    event,
    function_tool,
    object_at,
    openai_refusal,
    refusal_of,
    texts_of,
)
from services.inference.workflows.agents import (
    Call,
    CapturedTurn,
    TurnRequest,
    apart_message,
    plain_arguments,
    tool_message,
)

# --- OpenAI's Responses: writes answers and their events.


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


_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")


class ResponsesRequest(DialectRequest):
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    top_logprobs: Literal[0] | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    context_management: list[Any] | None = Field(default=None, max_length=0)

    @field_validator("tools", mode="before")
    @classmethod
    def _as_functions(cls, tools: Any) -> Any:
        return [_function(tool) for tool in tools] if isinstance(tools, list) else tools

    @field_validator("text")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        form = (value or {}).get("format")
        if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
            raise ValueError("answers are text; write {'format': {'type': 'text'}} or remove the field")
        return value

    @field_validator("include")
    @classmethod
    def _no_logprobs(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError("log-probabilities are not part of a response; chat completions have them")
        return value

    def preface(self) -> list[Message]:
        return [{"role": "system", "content": self.instructions}] if self.instructions is not None else []

    def previous(self) -> str | None:
        return self.previous_response_id

    def ask(self, policy: str) -> TurnRequest:
        return self._ask(policy, read_calls=self.tool_choice != "none", max_tokens=self.max_output_tokens)


def _function(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


class _Turn:
    """The items of one turn of the policy, as they come."""

    def __init__(self) -> None:
        self.thought: str | None = None
        self.said = ""
        self.calls: list[Call] = []

    def message(self) -> Message:
        return apart_message(self.said, self.thought, self.calls)


def read_input(items: Sequence[Any], limits: ItemLimits) -> list[Message]:
    messages: list[Message] = []
    turn: _Turn | None = None
    for i, item in enumerate(items):
        where = f"input[{i}]"
        read = _read_item({"role": "user", "content": item} if isinstance(item, str) else item, where, limits)
        if isinstance(read, dict):
            if turn is not None:
                messages.append(turn.message())
                turn = None
            messages.append(read)
        else:
            turn = turn or _Turn()
            kind, value = read
            if kind == "thought":
                turn.thought = value if turn.thought is None or value is None else turn.thought + value
            elif kind == "said":
                turn.said += value
            else:
                turn.calls.append(value)
    return messages if turn is None else [*messages, turn.message()]


def _read_item(item: Any, where: str, limits: ItemLimits) -> dict[str, Any] | tuple[str, Any]:
    """A message that is no turn of the policy, or a part of such a turn: ``thought``, ``said`` or ``call``, and its value."""
    item = object_at(item, where)
    kind = item.get("type", "message")
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InvalidRequestError(f"{where}.role is {item.get('role')!r}; must be one of {', '.join(_ROLES)}")
        content = _text_of(item.get("content"), f"{where}.content")
        return ("said", content) if role == "assistant" else {"role": role, "content": content}
    if kind == "reasoning":
        content = item.get("content")
        return "thought", _text_of(content, f"{where}.content") if content else None
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments") or "{}"
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise InvalidRequestError(f"{where} needs name and arguments; arguments must be JSON as text")
        return "call", Call(id=str(item.get("call_id", "")), name=name, arguments=plain_arguments(arguments))
    if kind == "function_call_output":
        output = limits.tool_result(_text_of(item.get("output"), f"{where}.output"))
        return tool_message(str(item.get("call_id", "")), output)
    raise InvalidRequestError(
        f"{where} is of type {kind!r}; must be message, reasoning, function_call or function_call_output", param=where
    )


def _text_of(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is {type(content).__name__}; it must be text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        part = object_at(part, f"{where}[{i}]")
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") not in _TEXTS or not isinstance(text, str):
            raise InvalidRequestError(
                f"{where}[{i}] is of type {part.get('type')!r}, which is no text; the policies read text alone"
            )
        texts.append(text)
    return "".join(texts)


RESPONSES = Dialect(
    path="/responses",
    items="input",
    request=ResponsesRequest,
    read_items=read_input,
    writer=ResponsesWriter,
    refusal=openai_refusal,
    counts="/input_tokens",
    counted=lambda count: {"object": "response.input_tokens", "input_tokens": count},
)
