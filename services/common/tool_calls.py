"""Reading Hermes tool calls out of an assistant turn. Pure functions of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the policy wrote it; the arguments are not checked against a schema yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that cannot be read; ``error`` is what the policy is told."""

    error: str


def find_call(text: str) -> str | MalformedCall | None:
    """What stands between the first pair of tags; None when there is no call at all."""
    _, found, rest = text.partition(OPEN)
    if not found:
        return None
    content, closed, _ = rest.partition(CLOSE)
    if not closed:
        return MalformedCall(error="a tool_call tag is opened and not closed")
    return content


def split_calls(text: str) -> tuple[str, list[str]]:
    """The text without its calls, and what stands between each pair of tags. A tag that is not closed stays text.

    >>> split_calls("I look. <tool_call>a</tool_call><tool_call>b</tool_call>")
    ('I look. ', ['a', 'b'])
    """
    said: list[str] = []
    calls: list[str] = []
    rest = text
    while True:
        before, found, after = rest.partition(OPEN)
        content, closed, behind = after.partition(CLOSE)
        if not (found and closed):
            return "".join([*said, rest]), calls
        said.append(before)
        calls.append(content)
        rest = behind


def parse_json_call(content: str) -> ToolCall | MalformedCall:
    """One JSON object ``{"name": ..., "arguments": {...}}``."""
    try:
        call = json.loads(content)
    except ValueError as error:  # JSONDecodeError, and integers of absurd length
        return MalformedCall(error=f"not valid JSON: {error}")
    except RecursionError:
        return MalformedCall(error="not valid JSON: nested too deeply")
    if not isinstance(call, dict):
        return MalformedCall(error="the call must be one JSON object with name and arguments")
    if not isinstance(call.get("name"), str):
        return MalformedCall(error='"name" is missing or no string')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return MalformedCall(error='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)


Cut = Literal["start", "middle", "end"]
_MARK = " ...(cut)... "


def cut_text(text: str, max_chars: int, where: Cut = "middle") -> str:
    """At most ``max_chars`` characters of a text: what is left out is at its start, in its middle or at its end.

    >>> cut_text("0123456789" * 3, 20), cut_text("0123456789" * 3, 20, "end"), cut_text("0123456789" * 3, 20, "start")
    ('0123 ...(cut)... 789', '0123456 ...(cut)... ', ' ...(cut)... 3456789')
    """
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_MARK)
    if room < 2:
        return text[-max_chars:] if where == "start" else text[:max_chars]
    tail = {"start": room, "middle": room // 2, "end": 0}[where]
    return text[: room - tail] + _MARK + text[len(text) - tail :]
