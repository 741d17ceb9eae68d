"""Reads the body of a request: an object with a list of items, such as ``messages``, among its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import InvalidRequestError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(body: bytes, name: str) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """All fields but the items, and the items of ``name``; a text is one item.

    Raises ``InvalidRequestError`` for another body. Whole numbers of any size stay exact: they are arguments of calls.
    """

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs) and [key for key, _ in pairs].count(name) > 1:
            raise InvalidRequestError(f"the body has {name} twice", param=name)
        return fields

    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is no UTF-8: {error}") from None
    try:
        fields = json.loads(text, object_pairs_hook=read)
        if _SURROGATE.search(text):
            json.dumps(fields, ensure_ascii=False).encode()  # raises for a half of a pair
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body is no JSON object but {type(fields).__name__}")
    if name not in fields:
        raise InvalidRequestError(f"{name} is missing", param=name)
    items = fields.pop(name)
    if not isinstance(items, str | list):
        raise InvalidRequestError(f"{name} is no JSON list or text but {type(items).__name__}", param=name)
    return fields, [items] if isinstance(items, str) else items
