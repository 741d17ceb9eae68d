"""Requests of the endpoint in one form, read by the table of a dialect, and their items as plain messages.

Fields without effect here (``user``, ``metadata``, ...) are ignored; fields that request an unsupported feature are refused
by name, so that no run trains under settings that were not requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog
from pydantic import ValidationError, field_validator

from services.common.errors import (
    CapacityError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    RollmillError,
    UnauthenticatedError,
    UnknownPolicyError,
)
from services.common.importing import place_of_error, told
from services.common.text.chat import Message, joined_parts
from services.common.text.tools import cut_text
from services.inference.workflows.agents import (
    DEFAULT_MODEL,
    Call,
    TurnRequest,
    apart_message,
    assistant_message,
    plain_arguments,
    written_arguments,
)

log = structlog.get_logger(__name__)
Json = dict[str, Any]


class UnknownSessionError(NotFoundError):
    """No rollout has this session, or its rollout is over."""


# --- The form of a request, and the table of a dialect that maps a body to the form.


def function_tool(name: Any, description: Any, parameters: Any) -> Json:
    """A tool as templates list it. Fields that are None are left out."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


class Form(TurnRequest):
    """A request without its items (messages, input)."""

    given: Json  # all fields, as they came
    model: str = DEFAULT_MODEL
    stream: bool = False
    system: str | None = None  # of a field of its own, before the items
    previous: str | None = None  # the id of an answer after whose conversation the items follow
    logprobs: bool = False
    tells_usage: bool = False  # at the end of a stream
    is_kept: bool = True  # for clients that fetch the answer by its id

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[Json]) -> list[Json]:
        """Each is a function with a name of its own and, if any, the schema of an object."""
        try:
            orjson.dumps(tools)
        except (RecursionError, TypeError):  # the latter also for an integer of more than 64 bits
            raise ValueError("they are nested too deeply, or have a number that is too large") from None
        names = set()
        for i, tool in enumerate(tools):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, Mapping):
                raise ValueError(
                    f"tool {i} is of type {tool.get('type')!r}; only functions can be called here: turn this tool off in the "
                    "agent"
                )
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise ValueError(f"tool {i} has no name")
            if name in names:
                raise ValueError(f"two tools have the name {name!r}")
            names.add(name)
            schema = function.get("parameters")
            if schema is not None and not (isinstance(schema, Mapping) and schema.get("type") in (None, "object")):
                raise ValueError(f"the parameters of {name!r} are no JSON Schema of an object: {str(schema)[:60]}")
        return tools

    @field_validator("stop")
    @classmethod
    def _are_short(cls, stops: list[str]) -> list[str]:
        if len(stops) > 16 or any(not 0 < len(stop) <= 256 for stop in stops):
            raise ValueError("at most 16 texts of 1 to 256 characters")
        return stops


TOOL_RESULT_CHARS = 262_144  # of a tool's result; the policy reads the rest and a mark


def tool_result(call_id: Any, text: str) -> Json:
    """The message of a tool's result, which is cut."""
    return {"role": "tool", "content": cut_text(text, TOOL_RESULT_CHARS), "tool_call_id": str(call_id or "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error for a client: only transient errors have a status that clients retry."""

    status: int
    code: str
    message: str
    param: str | None = None


_SAME = ("model", "stream", "temperature", "top_p", "top_k", "min_p")
Named = str | tuple[str, Callable[[Any], Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """``items`` names the field with the list that grows with a conversation. ``fields``: of the form by names in the dialect,
    with a conversion where the values differ; the last one that is given counts. ``only``: the one value that a field may
    have, None for no value. ``checks``: what is wrong with the value of a field. ``as_function``: a tool as chat completions
    have it. ``counts``: the path, behind the dialect's, that counts tokens, and ``counted`` the body of its answer."""

    path: str
    items: str
    fields: Mapping[str, Named]
    only: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    as_function: Callable[[Any], Any] = lambda tool: tool
    read_items: Callable[[Sequence[Any]], list[Message]]
    writer: Callable[..., Any]  # of an ``AnswerWriter``
    refusal: Callable[[Refusal], tuple[int, Json]]
    counts: str | None = None
    counted: Callable[[int], Json] = lambda count: {"input_tokens": count}

    def refused(self, error: Exception) -> tuple[int, Json]:
        """Status and body of an error."""
        return self.refusal(refusal_of(known(error)))

    def form_of(self, given: Mapping[str, Any]) -> Form:
        """Raises ``InvalidRequestError``, which names the first wrong field."""
        for name, value in given.items():
            if value is None:
                continue
            if name in self.only and value != (allowed := self.only[name]):
                must = (
                    f"must be {orjson.dumps(allowed).decode()} or left out" if allowed is not None else "leave it out"
                )
                raise InvalidRequestError(f"{name}: {must}", param=name)
            if name in self.checks and (wrong := self.checks[name](value)):
                raise InvalidRequestError(f"{name}: {wrong}", param=name)
        fields: Json = {"given": given}
        names = {}  # of the form's fields, in the dialect
        for name, own in {**dict.fromkeys(_SAME), "tools": ("tools", self._functions), **self.fields}.items():
            if given.get(name) is not None:
                own, converted = own if isinstance(own, tuple) else (own or name, lambda value: value)
                fields[own], names[own] = converted(given[name]), name
        try:
            return Form.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            own, *inside = first["loc"]
            where = ".".join(map(str, (names.get(own, own), *inside)))
            raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from None

    def _functions(self, tools: Any) -> Any:
        return [self.as_function(tool) for tool in tools] if isinstance(tools, list) else tools


_STATUSES: tuple[
    tuple[type[RollmillError], int, str], ...
] = (  # the first that fits; without a code, that of the error
    (UnknownSessionError, 401, "unknown_session"),
    (UnauthenticatedError, 401, ""),
    (PermissionDeniedError, 403, ""),
    (UnknownPolicyError, 404, "model_not_found"),
    (NotFoundError, 404, ""),
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InvalidRequestError, 400, ""),
    (CapacityError, 503, ""),
    (InfrastructureError, 503, ""),
    (RollmillError, 500, ""),
)


def refusal_of(error: RollmillError) -> Refusal:
    status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
    return Refusal(
        status=status,
        code=error.metadata.get("code", code or error.reason.lower()),
        message=error.message,
        param=error.metadata.get("param"),
    )


def known(error: Exception) -> RollmillError:
    """The error as the agent is told of it: one of the user's code, such as a script, with its place."""
    if isinstance(error, RollmillError):
        return error
    log.error("endpoint.failed", exc_info=error)
    return RollmillError(f"{place_of_error(error)}{told(error)}")


# --- Reads items as plain messages.


def object_at(value: Any, where: str) -> Mapping[str, Any]:
    """``value``, which must be an object. Raises ``InvalidRequestError``."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object")
    return value


def text_at(block: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(text := block.get(key), str):
        raise InvalidRequestError(f"{where}.{key} is {type(text).__name__}; it must be text")
    return text


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",), between: str = "") -> str:
    """The text of a content that is a text, or a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_parts(content, where, kinds, between)


def _no_text(where: str, kind: Any, wanted: Sequence[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is of type {kind!r}; must be {', '.join(wanted)}: the policies read text alone", param=where
    )


def _role_of(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> str:
    role = message.get("role")
    role = "system" if role == "developer" else role  # the name in newer clients
    if role not in roles:
        raise InvalidRequestError(f"{where}.role is {role!r}; must be one of {', '.join(roles)}")
    return str(role)


def _call_in(function: Mapping[str, Any], call_id: Any, where: str) -> Call:
    """A call whose arguments are JSON as text."""
    name, arguments = function.get("name"), function.get("arguments") or "{}"
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequestError(f"{where} needs name and arguments; arguments must be JSON as text")
    return Call(id=str(call_id or ""), name=name, arguments=plain_arguments(arguments))


class _PolicyTurn:
    """The parts of one turn of the policy, as they come: ``thought``, ``said`` or ``call``, each with its value."""

    def __init__(self) -> None:
        self._thought: str | None = None
        self._said = ""
        self._calls: list[Call] = []

    def add(self, kind: str, value: Any) -> None:
        if kind == "said":
            self._said += value
        elif kind == "call":
            self._calls.append(value)
        else:  # None where the client left it out
            self._thought = value if self._thought is None or value is None else self._thought + value

    def message(self) -> Message:
        return apart_message(self._said, self._thought, self._calls)


def read_chat(messages: Sequence[Any]) -> list[Message]:
    """Of chat completions."""
    plain: list[Message] = []
    for i, each in enumerate(messages):
        where = f"messages[{i}]"
        message = object_at(each, where)
        role = _role_of(message, where, ("system", "user", "assistant", "tool"))
        content = text_of(message.get("content"), f"{where}.content")
        if role == "tool":
            plain.append(tool_result(message.get("tool_call_id"), content))
        elif role == "assistant":
            made = message.get("tool_calls") or []
            if not isinstance(made, list):
                raise InvalidRequestError(f"{where}.tool_calls must be a list")
            calls = []
            for k, one in enumerate(made):
                call = object_at(one, f"{where}.tool_calls[{k}]")
                at = f"{where}.tool_calls[{k}].function"
                calls.append(_call_in(object_at(call.get("function"), at), call.get("id"), at))
            plain.append(assistant_message(content, calls))
        else:
            plain.append({"role": role, "content": content})
    return plain


_RESPONSE_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")


def read_input(items: Sequence[Any]) -> list[Message]:
    """Of Responses: the items of one turn of the policy (a reasoning, a message, calls) are one message here."""
    messages: list[Message] = []
    turn: _PolicyTurn | None = None
    for i, item in enumerate(items):
        read = _read_item(
            {"role": "user", "content": item} if isinstance(item, str) else item,
            f"input[{i}]",
        )
        if isinstance(read, tuple):
            turn = turn or _PolicyTurn()
            turn.add(*read)
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        messages.append(read)
    return messages if turn is None else [*messages, turn.message()]


def _read_item(item: Any, where: str) -> Json | tuple[str, Any]:
    """A message that is no turn of the policy, or a part of such a turn."""
    item = object_at(item, where)
    kind = item.get("type", "message")
    if kind == "message":
        role = _role_of(item, where, ("system", "user", "assistant"))
        content = text_of(item.get("content"), f"{where}.content", _RESPONSE_TEXTS)
        return ("said", content) if role == "assistant" else {"role": role, "content": content}
    if kind == "reasoning":
        content = item.get("content")
        return "thought", text_of(content, f"{where}.content", _RESPONSE_TEXTS) if content else None
    if kind == "function_call":
        return "call", _call_in(item, item.get("call_id"), where)
    if kind == "function_call_output":
        return tool_result(item.get("call_id"), text_of(item.get("output"), f"{where}.output", _RESPONSE_TEXTS))
    raise _no_text(where, kind, ("message", "reasoning", "function_call", "function_call_output"))


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Of Messages."""
    plain: list[Message] = []
    for i, each in enumerate(messages):
        where = f"messages[{i}]"
        message = object_at(each, where)
        role, content = _role_of(message, where, ("user", "assistant", "system")), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise InvalidRequestError(
                f"{where}.content is {type(content).__name__}; it must be text or a list of blocks"
            )
        placed = [(object_at(block, at), at) for k, block in enumerate(blocks) if (at := f"{where}.content[{k}]")]
        if role == "assistant":
            turn = _PolicyTurn()
            for block, at in placed:
                if block.get("type") != "redacted_thinking":
                    turn.add(*_read_block(block, at))
            plain.append(turn.message())
        else:
            plain += _read_user(
                role,
                placed,
            )
    return plain


def _read_block(block: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """A part of a turn of the policy."""
    kind = block.get("type")
    if kind == "text":
        return "said", text_at(block, "text", where)
    if kind == "thinking":
        return "thought", text_at(block, "thinking", where)
    if kind == "tool_use":
        given = object_at(block.get("input") or {}, f"{where}.input")
        name = text_at(block, "name", where)
        return "call", Call(id=str(block.get("id", "")), name=name, arguments=written_arguments(given))
    raise _no_text(where, kind, ("text", "thinking", "tool_use"))


def _read_user(role: str, blocks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Message]:
    """The results of tools are messages of their own, and the texts between them one each."""
    plain: list[Json] = []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            result = text_of(block.get("content"), f"{where}.content", between="\n")
            plain.append(tool_result(block.get("tool_use_id"), result))
        elif kind != "text":
            raise _no_text(where, kind, ("text", "tool_result"))
        elif plain and plain[-1]["role"] == role:
            plain[-1]["content"] += f"\n{text_at(block, 'text', where)}"
        else:
            plain.append({"role": role, "content": text_at(block, "text", where)})
    return [*plain] or [{"role": role, "content": ""}]
