"""A conversation as AgentBench shows it: whole while it is short, the newest of it when it is long."""

from __future__ import annotations

import re
from collections.abc import Sequence

Message = dict[str, str]  # role (user, agent), content

_MOST_PIECES = 3500
_LETTERS_A_PIECE = 7
_PIECE = re.compile(r"[^\W\d_]+|[^ \n]")


def num_pieces(text: str) -> int:
    """About the number of tokens: every seven letters of a word one, every other character one."""
    return sum(-(-len(piece) // _LETTERS_A_PIECE) if piece[0].isalpha() else 1 for piece in _PIECE.findall(text))


def cut(messages: Sequence[Message], most: int = _MOST_PIECES) -> list[Message]:
    """The first message, and of the others the newest that fit; the first says how many are left out."""
    first, others = messages[0], messages[1:]
    pieces, kept = num_pieces(first["content"]), 0
    for message in reversed(others):
        pieces += num_pieces(message["content"])
        if pieces >= most:
            break
        kept += 1
    if kept and others[-kept]["role"] == first["role"]:
        kept -= 1  # the first message is a user's: an agent's comes next
    omitted = len(others) - kept
    if omitted:
        first = {**first, "content": f"{first['content']}\n\n[NOTICE] {omitted} messages are omitted."}
    return [first, *others[len(others) - kept :]]
