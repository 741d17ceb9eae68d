"""Conversations in AgentBench's form: whole when short, only the newest messages when long."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

Message = dict[str, str]  # role (user, agent), content

_MOST_PIECES = 3500
_LETTERS_A_PIECE = 7
_PIECE = re.compile(r"[^\W\d_]+|[^ \n]")


def num_pieces(text: str) -> int:
    """About the number of tokens: every seven letters of a word one, every other character one."""
    return _count(text, sys.maxsize)


def _count(text: str, most: int) -> int:
    """``num_pieces``, counted no further than ``most``: a turn may have megabytes."""
    pieces = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        pieces += -(-len(piece) // _LETTERS_A_PIECE) if piece[0].isalpha() else 1
        if pieces >= most:
            break
    return pieces


def cut(messages: Sequence[Message], most: int = _MOST_PIECES) -> list[Message]:
    """The first message, and the newest others that fit; the first names the number of those left out."""
    first, others = messages[0], messages[1:]
    pieces, kept = _count(first["content"], most), 0
    for message in reversed(others):
        pieces += _count(message["content"], most)
        if pieces >= most:
            break
        kept += 1
    if kept and others[-kept]["role"] == first["role"]:
        kept -= 1  # the first message is a user's: an agent's comes next
    omitted = len(others) - kept
    if omitted:
        first = {**first, "content": f"{first['content']}\n\n[NOTICE] {omitted} messages are omitted."}
    return [first, *others[len(others) - kept :]]
