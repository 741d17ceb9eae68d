"""The endpoint's dialects: OpenAI's chat completions and Responses, Anthropic's Messages.

Each is a table over the form of a request (``forms``), with a writer of answers that gets the same blocks in the same order:
the thought, the text, the calls of tools. In chat completions the thought stays in the text.
"""

from __future__ import annotations

import enum
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from services.common.errors import RollmillError
from services.common.text.chat import Chat
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT
from services.inference.endpoint.forms import (
    Dialect,
    Form,
    Json,
    Refusal,
    function_tool,
    object_at,
    read_chat,
    read_input,
    read_messages,
    refusal_of,
    text_of,
)
from services.inference.workflows.agents import Answer, Call, CapturedTurn, settled

# --- Writes answers: blocks, one after the other.


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


class Kind(enum.Enum):
    THOUGHT = enum.auto()
    TEXT = enum.auto()


def split_growing(text: str, *, thinks: bool) -> tuple[str, str]:
    """Thought and text of an answer that still grows, without what may turn out to be a tag or space at an end.

    >>> split_growing("<thi", thinks=False), split_growing("<think>a b </th", thinks=False)
    (('', ''), ('a b', ''))
    """
    begun = text.lstrip()
    if not thinks and THOUGHT.startswith(begun[: len(THOUGHT)]) and len(begun) < len(THOUGHT):
        return "", ""
    if not thinks and not begun.startswith(THOUGHT):
        return "", text.strip()
    if thinks and THOUGHT.startswith(begun) and len(begun) < len(THOUGHT):
        return "", ""  # a template that opens the thought, and a policy that opens it again
    thought, ended, said = begun.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    return (thought if ended else settled(thought, [END_OF_THOUGHT])).strip(), said.strip()


class AnswerWriter(ABC):
    """Writes one answer: ``whole``, or ``begin``, any number of ``text``, then ``finish`` or ``fail``.

    A dialect writes the parts; ``num_blocks`` is the number of the block.
    """

    prefix = "answer"

    def __init__(self, form: Form, policy: str, chat: Chat, *, thinks: bool) -> None:
        """``thinks``: the policy's text begins within a thought."""
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.form = form
        self.policy = policy
        self.chat = chat
        self.num_blocks = 0
        self._thinks = thinks
        self._created = time.time()
        self._open: Kind | None = None
        self._sent = {Kind.THOUGHT: "", Kind.TEXT: ""}

    def text(self, settled: str) -> Iterable[bytes]:
        """Events of the text so far, which only grows, and is no part of a call or a stop."""
        thought, said = split_growing(settled, thinks=self._thinks)
        yield from self._grow(Kind.THOUGHT, thought)
        yield from self._grow(Kind.TEXT, said)

    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        """Events of all that was not sent, and of the end."""
        for kind, text in self.texts(turn.answer):
            if not text and not self.num_blocks:
                yield from self._begin_block(kind)
            yield from self._grow(kind, text)
        yield from self._end_block()
        for call in turn.answer.calls:
            yield from self.write_call(call)
            self.num_blocks += 1
        yield from self.end(turn)

    def stored(self) -> Json | None:
        """The body that the client may fetch by its id, once the answer is written; None for one that is not kept."""
        return None

    def texts(self, answer: Answer) -> Iterable[tuple[Kind, str]]:
        """The blocks of an answer before its calls. An answer of nothing is one empty text, which clients can return."""
        if answer.thought:
            yield Kind.THOUGHT, answer.thought
        if answer.said or not (answer.thought or answer.calls):
            yield Kind.TEXT, answer.said

    def _grow(self, kind: Kind, text: str) -> Iterable[bytes]:
        """With calls, space at the end of a text may have been sent before the cut was known: then nothing is left."""
        sent = self._sent[kind]
        if len(text) <= len(sent) or not text.startswith(sent):
            return
        if self._open is not kind:
            yield from self._end_block()
            yield from self._begin_block(kind)
        self._sent[kind] = text
        yield from self.write_delta(kind, text[len(sent) :])

    def _begin_block(self, kind: Kind) -> Iterable[bytes]:
        self._open = kind
        yield from self.begin_block(kind)

    def _end_block(self) -> Iterable[bytes]:
        if self._open is not None:
            yield from self.end_block(self._open, self._sent[self._open])
            self._open = None
            self.num_blocks += 1

    @abstractmethod
    def whole(self, turn: CapturedTurn) -> Json:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Events before the first token."""

    @abstractmethod
    def fail(self, error: RollmillError) -> Iterable[bytes]:
        """Events of a turn that failed after the first event."""

    def begin_block(self, kind: Kind) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]: ...

    def end_block(self, kind: Kind, text: str) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def write_call(self, call: Call) -> Iterable[bytes]: ...

    @abstractmethod
    def end(self, turn: CapturedTurn) -> Iterable[bytes]: ...


# --- Chat completions.


class ChatWriter(AnswerWriter):
    """The thought stays in the text of an answer: clients of chat completions read and return one text."""

    prefix = "chatcmpl-"
    _num_calls = 0

    def whole(self, turn: CapturedTurn) -> Json:
        message: Json = {"role": "assistant", "content": turn.answer.content}
        if turn.answer.calls:
            message |= {
                "content": turn.answer.content or None,
                "tool_calls": list(map(_function_call, turn.answer.calls)),
            }
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(turn),
            "logprobs": self._logprobs(turn),
        }
        return {**self._fields("chat.completion"), "choices": [choice], "usage": _chat_usage(turn)}

    def begin(self) -> Iterable[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, settled: str) -> Iterable[bytes]:
        return self._grow(Kind.TEXT, settled)

    def texts(self, answer: Answer) -> Iterable[tuple[Kind, str]]:
        yield Kind.TEXT, answer.content

    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]:
        yield self._chunk({"content": text})

    def write_call(self, call: Call) -> Iterable[bytes]:
        yield self._chunk({"tool_calls": [{"index": self._num_calls, **_function_call(call)}]})
        self._num_calls += 1

    def end(self, turn: CapturedTurn) -> Iterable[bytes]:
        yield self._chunk({}, finish_reason=_finish_reason(turn), logprobs=self._logprobs(turn))
        if self.form.tells_usage:
            yield event({**self._fields("chat.completion.chunk"), "choices": [], "usage": _chat_usage(turn)})
        yield b"data: [DONE]\n\n"

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        yield event(openai_refusal(refusal_of(error))[1])
        yield b"data: [DONE]\n\n"

    def _fields(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": int(self._created), "model": self.policy}

    def _chunk(self, delta: Mapping[str, Any], **choice: Any) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}
        return event({**self._fields("chat.completion.chunk"), "choices": [one]})

    def _logprobs(self, turn: CapturedTurn) -> Json | None:
        """Log-probabilities of every sampled token under its sampling distribution."""
        if not self.form.logprobs:
            return None
        entries = []
        for segment in turn.generation.segments:
            for token, value in zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True):
                text = self.chat.decode([token])
                entries.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def _function_call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(turn: CapturedTurn) -> str:
    return "length" if not turn.ended else "tool_calls" if turn.answer.calls else "stop"


def _chat_usage(turn: CapturedTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": turn.num_sampled_tokens,
        "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
    }


def openai_refusal(refusal: Refusal) -> tuple[int, Json]:
    """An error for OpenAI's clients."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    fields = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return refusal.status, {"error": fields}


def _wrong_format(value: Any) -> str:
    is_text = value is None or (isinstance(value, Mapping) and value.get("type") == "text")
    return "" if is_text else "answers are text; write {'type': 'text'} or remove the field"


CHAT = Dialect(
    path="/chat/completions",
    items="messages",
    fields={
        "tool_choice": "tool_choice",
        "stop": ("stop", lambda value: [value] if isinstance(value, str) else value),
        "max_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "seed": "seed",
        "logprobs": "logprobs",
        "stream_options": (
            "tells_usage",
            lambda value: object_at(value, "stream_options").get("include_usage") or False,
        ),
    },
    only={
        "top_logprobs": 0,
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "functions": None,
    },
    checks={"response_format": _wrong_format},
    read_items=read_chat,
    writer=ChatWriter,
    refusal=openai_refusal,
)


# --- Responses.


_DELTA = {Kind.THOUGHT: "response.reasoning_text", Kind.TEXT: "response.output_text"}


class ResponsesWriter(AnswerWriter):
    """Each block is an output item; the events of a text are those of its item and of its only part."""

    prefix = "resp_"

    def __init__(self, form: Form, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(form, policy, chat, thinks=thinks)
        self._sequence = 0
        self._output: list[Json] = []  # finished items
        self._whole: Json | None = None  # the finished response

    def whole(self, turn: CapturedTurn) -> Json:
        list(self.finish(turn))
        assert self._whole is not None
        return self._whole

    def begin(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def fail(self, error: RollmillError) -> Iterable[bytes]:
        fields = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed", error=fields))

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

    def stored(self) -> Json | None:
        return self._whole if self.form.is_kept else None

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
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": self._id("fc"), "type": "function_call", **fields, "status": "completed"}

    def _finished(self, turn: CapturedTurn) -> Json:
        usage = {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
        }
        if turn.ended:
            self._whole = self._response("completed", usage=usage)
        else:
            incomplete = {"reason": "max_output_tokens"}
            self._whole = self._response("incomplete", usage=usage, incomplete_details=incomplete)
        return self._whole

    def _response(self, status: str, **fields: Any) -> Json:
        form, given = self.form, self.form.given
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.policy,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "instructions": form.system,
            "max_output_tokens": form.max_tokens,
            "metadata": given.get("metadata") or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": form.previous,
            "store": form.is_kept,
            "temperature": form.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": form.tool_choice,
            "tools": [
                {"type": "function", "parameters": None, "strict": False, **tool["function"]} for tool in form.tools
            ],
            "top_p": form.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _part(kind: Kind, text: str) -> Json:
    if kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _of_responses(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _wrong_include(value: Any) -> str:
    if isinstance(value, list) and "message.output_text.logprobs" in value:
        return "log-probabilities are not part of a response; chat completions have them"
    return ""


RESPONSES = Dialect(
    path="/responses",
    items="input",
    fields={
        "instructions": "system",
        "previous_response_id": "previous",
        "store": "is_kept",
        "max_output_tokens": "max_tokens",
        "tool_choice": "tool_choice",
    },
    only={
        "top_logprobs": 0,
        "truncation": "disabled",
        "background": False,
        "conversation": None,
        "prompt": None,
        "context_management": [],
    },
    checks={
        "text": lambda value: _wrong_format(object_at(value, "text").get("format")),
        "include": _wrong_include,
        "metadata": lambda value: "" if isinstance(value, Mapping) else "must be an object",
    },
    as_function=_of_responses,
    read_items=read_input,
    writer=ResponsesWriter,
    refusal=openai_refusal,
    counts="/input_tokens",
    counted=lambda count: {"object": "response.input_tokens", "input_tokens": count},
)


# --- Messages.


_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class MessagesWriter(AnswerWriter):
    prefix = "msg_"

    def whole(self, turn: CapturedTurn) -> Json:
        content = [self._block(kind, text) for kind, text in self.texts(turn.answer)]
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(call.arguments)}
            for call in turn.answer.calls
        ]
        return self._message([*content, *calls], _messages_usage(turn), **_end(turn))

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
        yield _event("message_delta", delta=_end(turn), usage=_messages_usage(turn))
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
    if not turn.ended:
        reason = "max_tokens"
    elif turn.answer.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if turn.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": turn.stop if reason == "stop_sequence" else None}


def _messages_usage(turn: CapturedTurn) -> Json:
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


def _of_messages(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        return tool
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _wrong_edits(value: Any) -> str:
    edits = object_at(value, "context_management").get("edits") or []
    kinds = [edit.get("type") if isinstance(edit, Mapping) else edit for edit in edits]
    refused = [kind for kind in kinds if not str(kind).startswith("clear_thinking_")]
    return (
        f"{refused[0]!r} would rewrite the history on the server, which keeps it as it was sampled" if refused else ""
    )


MESSAGES = Dialect(
    path="/messages",
    items="messages",
    fields={
        "system": ("system", lambda value: text_of(value, "system", between="\n")),
        "max_tokens": "max_tokens",
        "stop_sequences": "stop",
        "tool_choice": ("tool_choice", lambda value: object_at(value, "tool_choice").get("type")),
    },
    only={"container": None, "mcp_servers": []},
    checks={
        "output_config": lambda value: _wrong_format(object_at(value, "output_config").get("format")),
        "context_management": _wrong_edits,
    },
    as_function=_of_messages,
    read_items=read_messages,
    writer=MessagesWriter,
    refusal=anthropic_refusal,
    counts="/count_tokens",
)
DIALECTS = (CHAT, RESPONSES, MESSAGES)
