"""Keeps text that looks like a token of the chat template from acting as one, so that no message begins or ends a turn.

A tokenizer finds its added tokens anywhere in a rendered prompt, in text of any author. So every string of a message
and of a tool's schema is changed before it reaches the template, at any depth. Uses two attributes of a tokenizer and
no tokenizer library.

Two sets. *Control* tokens (``<|im_start|>``, ``<|endoftext|>``, ``<s>``) are written by the template only: those around
turns, the tokenizer's own (begin, end, padding, unknown), and others marked as special there. Tags that policies and
prompts write themselves (``<think>``, ``<tool_call>``) are no control tokens though some tokenizers mark them as
special; only tools, programs and later users may not write those either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.common.errors import InvalidRequestError

Message = Mapping[str, Any]

_TAG = re.compile(r"</?[A-Za-z_]+>")


class SpecialText:
    """The texts of a tokenizer's special and added tokens of more than one character."""

    def __init__(self, tokenizer: Any, frame: str) -> None:
        """``frame``: a dialogue rendered by the template, for the tokens around its turns."""
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        marked = {str(text) for text in tokenizer.all_special_tokens}
        texts = {str(token) for token in added.values()} | marked
        marked |= {str(token) for token in added.values() if getattr(token, "special", True)}
        own = {str(getattr(tokenizer, f"{name}_token", None) or "") for name in ("bos", "eos", "pad", "unk")}
        control = {text for text in marked if not _TAG.fullmatch(text)} | {text for text in texts if text in frame}
        self._any = _matching(texts)
        self._control = _matching(control | own)

    def as_text(self, text: str) -> str:
        """The text with a space inside every match of one of the tokens."""
        return _split(text, self._any)

    def of_stranger(self, message: Message) -> Message:
        """A message of a tool, a program or a later user: none of the tokens is written."""
        return self._harmless(message, self._any)

    def of_prompt(self, message: Message) -> Message:
        """A message of a prompt: no control token is written; of a tool's message, no special token."""
        return self._harmless(message, self._any if message.get("role") == "tool" else self._control)

    def of_tools(self, tools: Any) -> Any:
        """Schemas of tools: names, descriptions and values write no control token."""
        return _deep(tools, self._control)

    def _harmless(self, message: Message, pattern: re.Pattern[str]) -> Message:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            message = {**message, "content": joined_parts(content)}
        elif content is None:
            message = {**message, "content": ""}
        found: Message = _deep(message, pattern)
        return found


def joined_parts(content: Any, where: str = "content") -> str:
    """The text of a content that is a list of ``{"type": "text", "text": ...}``.

    Joined before the search: a token may extend over two parts. Raises ``InvalidRequestError`` for parts of other
    types, and for other types than a list.
    """
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is {type(content).__name__}; it must be text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequestError(
                f'{where}[{number}] is {type(part).__name__}; a part is {{"type": "text", "text": ...}}'
            )
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{where}[{number}] is of type {part.get('type')!r}, which is no text; the policies read text alone"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}[{number}].text is {type(part.get('text')).__name__}; it must be text")
        texts.append(part["text"])
    return "".join(texts)


def _matching(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")


def _split(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda m: f"{m.group()[0]} {m.group()[1:]}", text)


def _deep(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return _split(value, pattern)
    if isinstance(value, Mapping):
        return {_deep(name, pattern): _deep(inner, pattern) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_deep(inner, pattern) for inner in value]
    return value
