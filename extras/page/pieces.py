"""Texts of single tokens, which add up to the text of all."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "�"
_LONGEST = 8  # tokens of one character; more are not one
_ANCHORS = range(512)


class Pieces:
    """Texts of token ids by one tokenizer, so that the tokens of a turn can be told apart. Without one, ids are shown as
    numbers.

    A byte-level tokenizer may cut one character into several tokens, and then each alone decodes to the replacement
    sign: such tokens are decoded together, and the first of them has the text. A tokenizer may also drop the space
    before the first word of a text: so a token is decoded behind another one, whose text is then taken off.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor = next((number for number in _ANCHORS if self._is_anchor(number)), None) if tokenizer else None

    def _is_anchor(self, number: int) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode([number])
        return len(text) == 1 and text.isascii() and text.isalnum()

    @property
    def are_text(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: list[int]) -> list[str]:
        """One text for each token, whose sum is the text of all; empty for the later tokens of one character. [num_tokens]"""
        if self._tokenizer is None:
            return [f"[{token}] " for token in ids]
        texts = [self._alone(token) for token in ids]
        at = 0
        while at < len(texts):
            if _REPLACEMENT not in texts[at]:
                at += 1
                continue
            end, whole = self._character(ids, at)
            texts[at:end] = [whole, *[""] * (end - at - 1)]
            at = end
        return texts

    def _character(self, ids: list[int], begin: int) -> tuple[int, str]:
        """Where the tokens of a character end, and the text; of bytes that are no character, one token."""
        for end in range(begin + 2, min(begin + _LONGEST, len(ids)) + 1):
            whole = self._decoded(ids[begin:end])
            if _REPLACEMENT not in whole:
                return end, whole
        return begin + 1, self._alone(ids[begin])

    def _alone(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decoded([token])
        return found

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        if self._anchor is None:
            return str(self._tokenizer.decode(list(ids)))
        return str(self._tokenizer.decode([self._anchor, *ids]))[1:]
