"""Reads the body of a request at a cost that does not grow with the conversation.

Every request of an agent repeats all earlier items: ``messages``, or ``input``. If a body begins with an earlier body up to
the end of that body's items, only the rest is parsed; comparing the text is one memory comparison.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequestError

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownHead:
    """The text of a body up to the end of its last item, and the fields before the items. ``name``: of their list."""

    name: str
    text: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """``items`` are those behind ``known``, or all. ``head``: the text with which a later body may begin."""

    fields: Mapping[str, Any]  # all but the items
    items: tuple[Any, ...]
    head: KnownHead | None
    known: KnownHead | None


def read_body(text: str, name: str, known: Iterable[KnownHead] = ()) -> ParsedBody:
    """Parse a body. Raises ``InvalidRequestError`` unless the body is a JSON object that has in ``name`` a list of items, or
    a text, which is one item."""
    try:
        return _read(text, name, known)
    except (ValueError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON that can be read: {error}") from None


def _read(text: str, name: str, known: Iterable[KnownHead]) -> ParsedBody:
    begun = next((head for head in known if head.name == name and text.startswith(head.text)), None)
    begin = 0 if begun is None else len(begun.text)
    if begun is None:
        read = _read_all(text, name)
    else:
        read = _read_rest(text, begin, dict(begun.fields), name, begun, first=False)
    if _SURROGATE.search(text, begin):
        json.dumps((read.fields, read.items), ensure_ascii=False).encode()  # raises for a half of a pair
    return read


def _read_all(text: str, name: str) -> ParsedBody:
    position = _expect(text, 0, "{")
    fields: dict[str, Any] = {}
    position, at_items = _read_fields(text, position, fields, name, first=True)
    if not at_items:
        raise InvalidRequestError(f"{name} is missing", param=name)
    position = _skip(text, position)
    if text[position] == '"':
        item, position = _decode(text, position)
        return _read_end(text, position, fields, name, (item,), head=None, known=None)
    return _read_rest(text, _expect(text, position, "["), fields, name, None, first=True)


def _read_rest(
    text: str, position: int, before: dict[str, Any], name: str, known: KnownHead | None, *, first: bool
) -> ParsedBody:
    """From within the list of items to the end of the body."""
    items: list[Any] = []
    end = position  # of the last item
    while (position := _skip(text, position)) < len(text) and text[position] != "]":
        if not first:
            position = _expect(text, position, ",")
        first = False
        item, end = _decode(text, _skip(text, position))
        items.append(item)
        position = end
    head = KnownHead(name=name, text=text[:end], fields=dict(before))
    return _read_end(text, _expect(text, position, "]"), before, name, tuple(items), head=head, known=known)


def _read_end(
    text: str,
    position: int,
    before: dict[str, Any],
    name: str,
    items: tuple[Any, ...],
    *,
    head: KnownHead | None,
    known: KnownHead | None,
) -> ParsedBody:
    """From behind the items to the end of the body."""
    fields = dict(before)
    position, again = _read_fields(text, position, fields, name, first=False)
    if again:
        raise InvalidRequestError(f"the body has {name} twice", param=name)
    if _skip(text, position) != len(text):
        raise ValueError("text follows the object")
    return ParsedBody(fields=fields, items=items, head=head, known=known)


def _read_fields(text: str, position: int, fields: dict[str, Any], items: str, *, first: bool) -> tuple[int, bool]:
    """Members of the object up to the items (True) or behind its end (False)."""
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
        if name == items:
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
