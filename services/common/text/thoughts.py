"""Separates the thought of a turn from its answer, by the tags that policies write around a thought."""

from __future__ import annotations

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


def split_thought(text: str, *, thinks: bool = False) -> tuple[str, str]:
    """Thought and text, both without surrounding space. ``thinks``: the prompt ends within a thought.

    >>> split_thought("<think>so</think> 42"), split_thought("so</think>42", thinks=True), split_thought("42")
    (('so', '42'), ('so', '42'), ('', '42'))
    """
    begun = text.lstrip()
    if not (thinks or begun.startswith(THOUGHT)):
        return "", text.strip()
    thought, _, said = begun.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    return thought.strip(), said.strip()


def after_thoughts(text: str) -> str:
    """The text after the last thought, up to one that never ends.

    >>> after_thoughts("<think>hm</think> 42"), after_thoughts("42"), after_thoughts("<think>hm")
    (' 42', '42', '')
    """
    return text.rpartition(END_OF_THOUGHT)[2].partition(THOUGHT)[0]
