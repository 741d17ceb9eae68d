"""OpenAI's Responses: reads requests and their input items.

The items of one turn of the policy (a reasoning, a message, calls) are one message here. ``previous_response_id`` goes on
after an earlier answer of the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.errors import InvalidRequestError
from services.common.text.chat import Message
from services.inference.endpoint.dialects.base import Dialect, DialectRequest, ItemLimits, object_at
from services.inference.endpoint.dialects.chat import openai_refusal
from services.inference.endpoint.dialects.responses_answers import ResponsesWriter
from services.inference.endpoint.dialects.tools import function_tool
from services.inference.workflows.agents.chat_messages import Call, apart_message, plain_arguments, tool_message
from services.inference.workflows.agents.turns import TurnRequest

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
