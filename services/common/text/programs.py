"""Extracts the program from a completion, in the same way for rewards and workflows.

Independent of tests and of how programs are run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FENCE = "```"
# The language, and the rest of its line where that is no code; a fence may also be followed by code.
_LABEL = re.compile(
    r"[ \t]*+(?P<python>(?i:py(?:thon)?)[\d.]*+)(?!\w)(?:[ \t]++(?:[^\s`()=:]*+|\{[^\n`]*+)[ \t]*+(?=\r?\n)|[ \t]*+)"
    r"|(?!from |import |[^\n]*\()[^\n`]*+(?=\n)"
    r"|"
)
_SHORT = 20  # characters: a shorter block is more often an example than a program


class _Block(NamedTuple):
    """A fenced block; the largest is the program."""

    label: int  # 2: python, 1: none, 0: another
    is_long: bool
    is_closed: bool
    place: int
    text: str


def fenced_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks, in order; a block that is not closed is none.

    >>> fenced_blocks("```json\\n[1]\\n``` and ```\\n2\\n```")
    ['[1]\\n', '2\\n']
    """
    return [block.text for block in _blocks(text) if block.is_closed]


def program_of(completion: str) -> str:
    """The fenced block that is the program, or the whole text where there is none.

    Blocks labelled python go before blocks without a label, and these before others; then blocks of 20 characters or
    more before shorter ones, closed ones before one that the end of the text cuts off, later ones before earlier ones.

    >>> program_of("First ```python\\nprint(1)\\n``` then ```python\\nprint(2)\\n``` prints ```\\n2\\n```")
    'print(2)\\n'
    """
    return max(_blocks(completion), default=_Block(0, False, False, 0, completion)).text


def _blocks(text: str) -> list[_Block]:
    found = []
    parts = text.split(_FENCE)
    for place in range(1, len(parts), 2):
        label = _LABEL.match(parts[place])
        assert label is not None  # of any text
        block = parts[place][label.end() :].removeprefix("\r").removeprefix("\n")
        kind = 2 if label["python"] else 0 if label[0].strip() else 1
        is_closed = place + 1 < len(parts)
        if is_closed or block.strip():
            found.append(_Block(kind, len(block.strip()) >= _SHORT, is_closed, place, block))
    return found


def with_preamble(program: str, preamble: str, entry_point: str) -> str:
    """The program behind the preamble of its task; without blanks around it, alone, where it defines the entry point
    itself or there is no preamble.

    >>> with_preamble("    return a + b", "def add(a, b):\\n", "add")
    'def add(a, b):\\n    return a + b'
    """
    return preamble + program if preamble and not _defines(program, entry_point) else program.strip()


def _defines(program: str, name: str) -> bool:
    return (
        bool(name)
        and re.search(rf"^[^\S\n]*+(?:async\s++)?(?:def|class)\s++{re.escape(name)}\b", program, re.MULTILINE)
        is not None
    )
