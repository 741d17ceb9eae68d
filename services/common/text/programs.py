"""Extracts the program from a completion, in the same way for rewards and workflows.

Independent of tests and of how programs are run.
"""

from __future__ import annotations

import re

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def fenced_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks, in order; a block that is not closed is none.

    >>> fenced_blocks("```json\\n[1]\\n``` and ```\\n2\\n```")
    ['[1]\\n', '2\\n']
    """
    return [str(block) for block in _FENCED.findall(text)]


def program_of(completion: str) -> str:
    """The last fenced block, or the whole text.

    >>> program_of("First ```python\\nprint(1)\\n``` then ```\\nprint(2)\\n``` done")
    'print(2)\\n'
    """
    blocks = fenced_blocks(completion)
    return blocks[-1] if blocks else completion


def with_preamble(program: str, preamble: str, entry_point: str) -> str:
    """The program behind the preamble of its task, unless the program defines the entry point itself.

    >>> with_preamble("    return a + b", "def add(a, b):\\n", "add")
    'def add(a, b):\\n    return a + b'
    """
    return preamble + program if preamble and not _defines(program, entry_point) else program


def _defines(program: str, name: str) -> bool:
    return (
        bool(name)
        and re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", program, re.MULTILINE) is not None
    )
