"""Removes the examples from the text of a programming problem, for policies that write test cases.

Line by line: a heading such as ``Example 2:``, ``-----Sample Input-----`` or ``### Examples`` begins the removed part, and
a heading that speaks of the whole problem (``Constraints``, ``Time Limit: ...``) ends it. Headings such as ``Output``,
``Note`` or ``Explanation`` belong to an example once one has begun. Doctests (``>>>``) go up to the next empty line, and
the end of a docstring ends both; a block of Python is the beginning of a solution and ends examples, too. Examples
inside a sentence stay.
"""

from __future__ import annotations

import re
import string

_DECORATION = string.whitespace + "\xa0*_=-~|"
_NUMBER = r"(?:\s*+(?:no\.?+\s*+)?+#?+\s*+\d++)?+"
_EXAMPLE = re.compile(
    rf"(?:(?:sample|example)s?{_NUMBER}(?:\s++(?:tests?|test\s++cases?|cases?|inputs?|outputs?|io|and|&|/)){{0,4}}{_NUMBER}"
    r"|examples?\s+of\s+(?:input|output).*|demo|(?:inputs?|outputs?)\s+(?:sample|example)s?"
    rf"{_NUMBER})",
    re.IGNORECASE,
)
_WHOLE_PROBLEM = (
    "constraint", "constraints", "input format", "output format", "input specification", "output specification",
    "function signature", "tag", "tags", "time limit", "memory limit", "limits", "restrictions", "subtask", "subtasks",
    "scoring", "follow up", "follow-up", "your task", "starter code",
)  # fmt: skip
_DOCTEST = ">>>"
_PYTHON = "```python"
_DOCSTRING = ('"""', "'''")


def without_examples(problem: str) -> str:
    """The problem without its examples; unchanged if no text would be left.

    >>> without_examples("Add two numbers.\\n\\nExample 1:\\nInput: 1 2\\nOutput: 3\\n\\nConstraints:\\nBoth fit a byte.")
    'Add two numbers.\\n\\nConstraints:\\nBoth fit a byte.'
    """
    lines = problem.split("\n")
    kept: list[str] = []
    in_example = in_doctest = False
    for line in lines:
        ends_docstring = any(quotes in line for quotes in _DOCSTRING)
        if in_doctest and (ends_docstring or not line.strip()):
            in_doctest = False
        if _begins_example(line):
            in_example = True
        elif ends_docstring or _begins_whole(line) or line.startswith(_PYTHON):
            in_example = False
        if line.lstrip().startswith(_DOCTEST):
            in_doctest = True
        if not in_example and not in_doctest:
            kept.append(line)
    if len(kept) == len(lines) or not any(line.strip() for line in kept):
        return problem
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def _begins_example(line: str) -> bool:
    return _EXAMPLE.fullmatch(_heading(line)) is not None


def _begins_whole(line: str) -> bool:
    return _heading(line).lower() in _WHOLE_PROBLEM


def _heading(line: str) -> str:
    """The line up to a colon, without rules, marks and spaces around it; a sentence is no heading."""
    return _undecorated(_undecorated(line).partition(":")[0])


def _undecorated(text: str) -> str:
    return text.lstrip(_DECORATION + ">#").rstrip(_DECORATION)
