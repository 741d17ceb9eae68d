"""Keeps text that looks like a token of the chat template from acting as one, so that no message begins or ends a turn.

A tokenizer finds its added tokens anywhere in a rendered prompt, in text of any author. So every string of a message
and of a tool's schema is changed before it reaches the template, at any depth. Uses attributes of a tokenizer and
no tokenizer library.

Two sets. *Control* tokens (``<|im_start|>``, ``<|endoftext|>``, ``<s>``) are written by the template only: those around
turns, the tokenizer's own (begin, end, padding, unknown), and others marked as special there. Tags that policies and
prompts write themselves (``<think>``, ``<tool_call>``) are no control tokens though some tokenizers mark them as
special; only tools, programs and later users may not write those either. Other plain added tokens (runs of spaces, words,
``<table>``) are text: of those that no tokenizer marks, only brackets that the template writes act on a dialogue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from services.common.errors import InvalidRequestError
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT
from services.common.text.tool_calls import CLOSE, OPEN

Message = Mapping[str, Any]
Split = Callable[[str], str]

_TAG = re.compile(r"</?[A-Za-z_]+>")
_BRACKETS = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_MARK = re.compile(r"<([|｜]).+\1>", re.DOTALL)  # of a role, which a template may put together


class SpecialText:
    """The texts of a tokenizer's special and added tokens of more than one character."""

    def __init__(self, tokenizer: Any, frame: str) -> None:
        """``frame``: a dialogue rendered by the template, for the tokens around its turns."""
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        marked = {str(text) for text in tokenizer.all_special_tokens}
        marked |= {str(token) for token in added.values() if getattr(token, "special", True)}
        own = {str(getattr(tokenizer, f"{name}_token", None) or "") for name in ("bos", "eos", "pad", "unk")}
        brackets = {text for text in map(str, added.values()) if _BRACKETS.fullmatch(text)}
        marks = {text for text in brackets if _MARK.fullmatch(text) or text in frame}
        written = f"{tokenizer.chat_template}{THOUGHT}{END_OF_THOUGHT}{OPEN}{CLOSE}"
        control = {text for text in marked if not _TAG.fullmatch(text) or text in frame} | marks | own
        every = marked | marks | own | {text for text in brackets if text in written}
        # A tokenizer searches for some tokens in the text as it is, and for others in the text as its normalizer leaves it.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        normalized = {str(token) for token in added.values() if getattr(token, "normalized", False)}
        normalise = getattr(normalizer, "normalize_str", None) if every & normalized else None
        self._any, self._control = (_splitter(texts, texts & normalized, normalise) for texts in (every, control))

    def as_text(self, text: str) -> str:
        """The text with a space inside every match of one of the tokens."""
        return self._any(text)

    def of_stranger(self, message: Message) -> Message:
        """A message of a tool, a program or a later user: none of the tokens is written."""
        return self._harmless(message, self._any)

    def of_prompt(self, message: Message) -> Message:
        """A message of a prompt: no control token is written; of a tool's message, no special token."""
        return self._harmless(message, self._any if message.get("role") == "tool" else self._control)

    def of_tools(self, tools: Any) -> Any:
        """Schemas of tools: names, descriptions and values write no control token."""
        return _deep(tools, self._control)

    def _harmless(self, message: Message, split: Split) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            message = {**message, "content": "" if content is None else joined_parts(content)}
        found: Message = _deep(message, split)
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


def _splitter(texts: Iterable[str], normalized: Iterable[str], normalise: Callable[[str], str] | None) -> Split:
    """Puts a space inside every match of a token, and of ``normalized`` ones in the text after ``normalise``."""
    plain = _matching(texts)
    if normalise is None:
        return lambda text: _split(text, plain)
    normal, read = _matching(map(normalise, normalized)), normalise

    def split(text: str) -> str:
        text = _split(text, plain)
        return _split(seen, normal) if normal.search(seen := read(text)) else text

    return split


def _matching(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")


def _split(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda m: f"{m.group()[0]} {m.group()[1:]}", text)


def _deep(value: Any, split: Split) -> Any:
    if isinstance(value, str):
        return split(value)
    if isinstance(value, Mapping):
        return {_deep(name, split): _deep(inner, split) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_deep(inner, split) for inner in value]
    return value
