"""Chat messages as agents outside write them, in one form: so that two can be compared, and so that any chat template
can show them.

A plain message has ``role`` and ``content`` (text), where they mean something ``tool_calls`` and ``tool_call_id``, and
nothing else. Pure functions of text and JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.common.chat import Message
from services.common.errors import InvalidRequestError
from services.common.special_text import joined_parts
from services.common.tool_calls import CLOSE, OPEN, MalformedCall, parse_json_call, split_calls

_ROLES = {"developer": "system"}  # what newer clients call it
_KNOWN = ("system", "user", "assistant", "tool")


def plain_message(message: Any, where: str) -> Message:
    """One message of a request; ``where`` names it in errors. Raises ``InvalidRequestError``."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object")
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    if role not in _KNOWN:
        raise InvalidRequestError(f"{where}.role is {role!r}; it must be one of {', '.join(_KNOWN)}")
    content = _text_of(message.get("content"), f"{where}.content")
    if role == "assistant":
        calls = [
            _plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.get("tool_calls") or [])
        ]
        content = content.strip()  # agents keep it with and without the space round it
        return {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}
    if role == "tool":
        return {"role": role, "content": content, "tool_call_id": str(message.get("tool_call_id", ""))}
    return {"role": role, "content": content}


def answer_message(text: str, *, with_calls: bool) -> dict[str, Any]:
    """What the policy said, as a message of OpenAI's. Where a call cannot be read, all of it stays text."""
    if with_calls:
        said, contents = split_calls(text)
        calls = [parse_json_call(content) for content in contents]
        if calls and not any(isinstance(call, MalformedCall) for call in calls):
            return {
                "role": "assistant",
                "content": said.strip() or None,
                "tool_calls": [
                    {
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
                    }
                    for call in calls
                    if not isinstance(call, MalformedCall)
                ],
            }
    return {"role": "assistant", "content": text}


def shown_to_template(message: Message) -> Message:
    """Role and text alone: the calls of an assistant are written into its text, as policies write them."""
    calls = [
        f'{OPEN}\n{{"name": {orjson.dumps(call["name"]).decode()}, "arguments": {call["arguments"]}}}\n{CLOSE}'
        for call in message.get("tool_calls", ())
    ]
    text = "\n".join([message["content"], *calls] if message["content"] else calls) if calls else message["content"]
    return {"role": message["role"], "content": text}


def same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    return len(ours) == len(theirs) and all(a == b for a, b in zip(ours, theirs, strict=True))


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return joined_parts(content, where)


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} needs function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}.function.arguments must be JSON as text")
    try:
        arguments = orjson.dumps(orjson.loads(arguments)).decode()  # so that spaces make no difference
    except ValueError:
        pass  # then it is compared as it is
    return {"id": str(call.get("id", "")), "name": function["name"], "arguments": arguments}
