"""Answers of a model that half of the time does well, for runs with a model that cannot (``forced.script``)."""

from __future__ import annotations

import json
import re
from typing import Any

WAY = ("down", "down", "right", "right", "down", "right")  # over gymnasium's lake


def call_add(cue: Any) -> str:
    """Call the tool ``add`` with the question's numbers, then repeat its result."""
    if not cue.said:
        left, right = re.findall(r"\d+", str(cue.task.data["question"]))
        call = {"name": "add", "arguments": {"a": int(left), "b": int(right)}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    results = re.findall(r"<tool_response>\s*(\d+)\s*</tool_response>", cue.prompt)
    return f"\\boxed{{{results[-1] if cue.is_right() and results else 0}}}"


def answer(cue: Any) -> str:
    """The row's answer, or none."""
    return f"<answer>{cue.task.data['answer'] if cue.is_right() else '?'}</answer>"


def cross(cue: Any) -> str:
    """Cross the lake, or walk into a hole."""
    return f"I go {WAY[len(cue.said) % len(WAY)] if cue.is_right() else 'right, then down'}."


def add_lines(cue: Any) -> str:
    """Solve the example tasks of Harbor with a command, or only look; then end."""
    if cue.said:
        return "Done."
    solutions = {
        "add-numbers": "echo $(($(paste -sd+ numbers.txt))) > sum.txt",
        "count-lines": "cd logs; grep -c error a.log b.log | tr : ' ' > ../counts.txt",
    }
    command = solutions[cue.task.task_id] if cue.is_right() else "ls"
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"
