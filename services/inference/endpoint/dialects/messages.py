"""Anthropic's Messages: reads requests and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from services.common.errors import InvalidRequestError
from services.common.text.chat import Message
from services.inference.endpoint.dialects.base import (
    Dialect,
    DialectRequest,
    ItemLimits,
    check_stops,
    object_at,
)
from services.inference.endpoint.dialects.messages_answers import MessagesWriter, anthropic_refusal
from services.inference.endpoint.dialects.tools import function_tool
from services.inference.workflows.agents.chat_messages import Call, apart_message, tool_message, written_arguments
from services.inference.workflows.agents.turns import TurnRequest


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
