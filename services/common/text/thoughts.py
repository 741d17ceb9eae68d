"""Separates an answer from the thought before it."""

from __future__ import annotations

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


def after_thoughts(text: str) -> str:
    """The text after the last thought; without the thought that begins and never ends.

    >>> after_thoughts("<think>hm</think> 42"), after_thoughts("42"), after_thoughts("<think>hm")
    (' 42', '42', '')
    """
    return text.rpartition(END_OF_THOUGHT)[2].partition(THOUGHT)[0]
