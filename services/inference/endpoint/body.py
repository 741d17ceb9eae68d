"""Reading the body of a chat request so that its cost does not grow with the conversation.

Every request of an agent repeats all that was said before. A body that begins with the same text as an earlier one, up to
the end of that one's messages, has only what follows parsed; comparing the text is one memory comparison.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequestError

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownHead:
    """The text of a body up to the end of its last message, and the fields that stand before the messages."""

    text: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody:
    """``messages`` are those behind ``known``, or all. ``head`` is what a later body may begin with."""

    fields: Mapping[str, Any]  # all but the messages
    messages: tuple[Any, ...]
    head: KnownHead
    known: KnownHead | None


def read_body(text: str, known: Iterable[KnownHead] = ()) -> ReadBody:
    """Raises ``InvalidRequestError`` for what is no JSON object with a list of messages."""
    try:
        for head in known:
            if text.startswith(head.text):
                return _read_rest(text, len(head.text), dict(head.fields), head, first=False)
        position = _expect(text, 0, "{")
        fields: dict[str, Any] = {}
        position, at_messages = _read_fields(text, position, fields, first=True)
        if not at_messages:
            raise InvalidRequestError("messages is missing")
        return _read_rest(text, _expect(text, position, "["), fields, None, first=True)
    except (ValueError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON that can be read: {error}") from None


def _read_rest(text: str, position: int, before: dict[str, Any], known: KnownHead | None, *, first: bool) -> ReadBody:
    """From within the list of messages to the end of the body."""
    messages: list[Any] = []
    end = position  # of the last message
    while (position := _skip(text, position)) < len(text) and text[position] != "]":
        if not first:
            position = _expect(text, position, ",")
        first = False
        message, end = _decode(text, _skip(text, position))
        messages.append(message)
        position = end
    head = KnownHead(text=text[:end], fields=dict(before))
    fields = dict(before)
    position, again = _read_fields(text, _expect(text, position, "]"), fields, first=False)
    if again:
        raise InvalidRequestError("messages stands twice in the body")
    if _skip(text, position) != len(text):
        raise ValueError("something follows the object")
    return ReadBody(fields=fields, messages=tuple(messages), head=head, known=known)


def _read_fields(text: str, position: int, fields: dict[str, Any], *, first: bool) -> tuple[int, bool]:
    """Members of the object up to the messages (True) or behind its end (False)."""
    while True:
        position = _skip(text, position)
        if text[position] == "}":
            return position + 1, False
        if not first:
            position = _skip(text, _expect(text, position, ","))
        first = False
        name, position = _decode(text, position)
        if not isinstance(name, str):
            raise ValueError(f"a name is expected at character {position}")
        position = _skip(text, _expect(text, position, ":"))
        if name == "messages":
            return position, True
        fields[name], position = _decode(text, position)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"{character!r} is expected at character {position}")
    return position + 1
