"""Text that messages and JSON can carry."""

from __future__ import annotations

from typing import TypeVar

Text = TypeVar("Text")


def encodable(value: Text) -> Text:
    """The value with a question mark for each lone surrogate of its texts, which a policy, a program or a tool may write.

    >>> encodable("a\\ud800"), encodable({"b": ["\\udfff"]})
    ('a?', {'b': ['?']})
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(map(encodable, value))  # type: ignore[return-value]
    if isinstance(value, dict):
        return {encodable(key): encodable(part) for key, part in value.items()}  # type: ignore[return-value]
    return value
