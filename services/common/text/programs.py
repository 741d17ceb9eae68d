"""Extracts the program from a completion, in the same way for rewards and workflows.

Independent of tests and of how programs are run.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

from services.common.text.thoughts import after_thoughts

_FENCE = re.compile(r"`{3,}|~{3,}")
_MARKER = re.compile(r"[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?")  # of an item of a list, which holds the fence
_PYTHON = re.compile(r"(?i:py(?:thon)?)[\d.]*+(?!\w)")
_MARKDOWN = re.compile(r"(?i:markdown|md)\b")
# Code on the line of a fence, told from a file's name, attributes and remarks.
_CODE = re.compile(
    r"""from\s+\S+\s+import\b|import\s|(?:async|class|def|for|if|try|while|with)\b[^\n]*:|@\w|"{3}|'{3}"""
    r"""|\w[\w.]*\(|[\w.,()\[\]*: ]*[ ][-+*/%&|^]?=[ ]|\w[\w., ]*=[^\n]*\("""
)
_SHORT = 20  # characters: a shorter block is more often an example than a program


class _Block(NamedTuple):
    """A fenced block; the largest is the program."""

    label: int  # 2: python, 1: none, 0: another, or a session with prompts
    is_fenced: bool  # not within a line
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
    """The fenced block that is the program, or the whole text where there is none; a thought is no part of the text.

    Blocks labelled python go before blocks without a label, and these before others; then blocks on lines of their own
    before those within a line, blocks of 20 characters or more before shorter ones, closed ones before one that the end
    of the text cuts off, later ones before earlier ones.

    >>> program_of("First ```python\\nprint(1)\\n``` then ```python\\nprint(2)\\n``` prints ```\\n2\\n```")
    'print(2)\\n'
    """
    answer = after_thoughts(completion)
    return max(_blocks(answer), default=_Block(0, False, False, False, 0, answer)).text


def _blocks(text: str) -> list[_Block]:
    """Fences as in CommonMark. One may also begin at the end of a line of text, and end at the end of a line of code."""
    found: list[_Block] = []
    fence = info = wrapper = ""  # of the open block; the fence around a text in Markdown, whose blocks count
    width = 0  # of the blanks and the marker before the open fence
    held: list[str] = []
    for line in io.StringIO(text, newline="\n"):
        indent = len(line) - len(line.lstrip(" \t"))
        place = _MARKER.match(line).end()  # type: ignore[union-attr]  # of any line
        if fence:
            run = _FENCE.match(line, indent)
            runs = _FENCE.findall(line)
            if run and run[0].startswith(fence) and indent < width + 4:
                found += _block(info, held, len(found), is_closed=True)
                is_next = line[run.end() : run.end() + 1].isalnum()  # a label: the block was not closed
                place = indent if is_next else run.end()
            elif not run and len(runs) % 2 and runs[-1].startswith(fence) and line.rstrip().endswith(runs[-1]):
                held.append(line.rstrip().removesuffix(runs[-1]))
                found += _block(info, held, len(found), is_closed=True)
                place = len(line)
            else:
                held.append(line[min(indent, width) :])
                continue
            fence, held = "", []
        run = _FENCE.match(line, place)
        if run and wrapper and run[0].startswith(wrapper) and not line[run.end() :].strip():
            wrapper = ""
        elif run and _MARKDOWN.match(line, run.end()):
            wrapper = run[0]
        elif run and (run[0][0] == "~" or "`" not in line[run.end() :]):
            fence, info, width = run[0], line[run.end() :], place
        else:
            ends = [run.span() for run in _FENCE.finditer(line, place) if run[0][0] == "`"]
            for (_, begin), (end, _) in zip(ends[::2], ends[1::2], strict=False):
                found += _block("", [line[begin:end]], len(found), is_closed=True, is_fenced=False)
            rest = line[ends[-1][1] :] if len(ends) % 2 else ""
            if len(ends) % 2 and (len(rest.split()) < 2 or _label(rest)[1]):  # else a fence that prose names
                fence, info, width = line[slice(*ends[-1])], rest, 0
    return found + (_block(info, held, len(found), is_closed=False) if fence else [])


def _block(info: str, held: list[str], place: int, *, is_closed: bool, is_fenced: bool = True) -> list[_Block]:
    text = "".join(held)
    label, code = _label(info if is_fenced else text)
    if is_fenced:
        text = code + text
    elif label == 2:
        text = _PYTHON.sub("", text.lstrip(" \t"), count=1).lstrip(" \t").removeprefix("\r")
    else:
        label = 0
    label = 0 if text.lstrip().startswith(">>>") else label
    is_long = len(text.strip()) >= _SHORT
    return [_Block(label, is_fenced, is_long, is_closed, place, text)] if is_closed or text.strip() else []


def _label(info: str) -> tuple[int, str]:
    """The kind of the label, and the code behind it."""
    begun = info.lstrip(" \t")
    python = _PYTHON.match(begun)
    rest = begun[python.end() :].lstrip(" \t") if python else begun
    code = rest if _CODE.match(rest) else ""
    return 2 if python else 1 if code or not rest.strip() else 0, code


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
