"""Scripts of ``actor_verifier`` and ``codegen_verifier``: the number of earlier turns decides the role.

    0 a solution   1 its review   2 the second solution

Each is right or wrong on its own draw: the review about the first solution, the test cases about the problem.
"""

from __future__ import annotations

import json

from services.inference.scripts.answers import answer, is_right
from services.inference.scripts.base import Cue
from services.inference.scripts.programs import cases_of, falsified, fenced
from services.inference.scripts.words import reasoning


def solve_and_verify(cue: Cue) -> str:
    """``actor_verifier``: solutions, and between them a verdict tag."""
    if len(cue.said) != 1:
        return answer(cue, right=cue.is_right(f"attempt/{len(cue.said)}"), topic=str(len(cue.said)))
    approve = is_right(cue.task.data, cue.said[0].text) == cue.is_right("verdict")
    return f"{_thought(cue)}{reasoning(cue)}<verdict>{'approve' if approve else 'reject'}</verdict>"


def write_and_test(cue: Cue) -> str:
    """``codegen_verifier``: programs, and between them test cases as a fenced JSON list."""
    if len(cue.said) != 1:
        return answer(cue, right=cue.is_right(f"attempt/{len(cue.said)}"), topic=str(len(cue.said)))
    cases = cases_of(cue.task.data, int(getattr(cue.settings, "num_cases", 2)))
    if not cue.is_right("cases"):
        cases = [falsified(case) for case in cases]
    return f"{_thought(cue)}{reasoning(cue)}{fenced(json.dumps(cases), 'json')}"


def _thought(cue: Cue) -> str:
    """A thought before the text, if the recipe turns on the verifier's thinking."""
    if not getattr(cue.settings, "verifier_thinking", False):
        return ""
    return f"<think>\n{reasoning(cue, 'thought').strip()}\n</think>\n\n"
