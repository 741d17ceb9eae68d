r"""``tool_use`` and ``tool_math``: one tool call that computes the answer, then the answer.

One call in four fails on purpose, so that penalties for failed calls differ within a group.
"""

from __future__ import annotations

import json

from services.inference.scripts.answers import boxed, value
from services.inference.scripts.base import Cue
from services.inference.scripts.words import reasoning

_FAILING_SHARE = 0.25


def call_and_answer(cue: Cue) -> str:
    right = cue.is_right()
    code = _code(cue, value(cue, right=right))
    call = _call(cue, code)
    if not cue.said and call is not None and cue.settings.max_turns > 1:
        return f"{reasoning(cue)}<tool_call>{call}</tool_call>"
    final = boxed(value(cue, right=right))
    tag = getattr(cue.settings, "answer_tag", "")
    return reasoning(cue) + (f"<{tag}>{final}</{tag}>" if tag else final)


def _code(cue: Cue, text: str) -> str:
    fails = cue.random("failing").random() < _FAILING_SHARE
    return "print(1 // 0)" if fails else f"print({text})" if text.isdigit() else f"print({text!r})"


def _call(cue: Cue, code: str) -> str | None:
    """The text between the tags; None if the recipe offers no tool that runs code."""
    if cue.settings.format == "code":
        return code
    if "python_code_with_standard_io" in cue.settings.tools:
        arguments = {"code": code, "input": ""}
        return json.dumps({"name": "python_code_with_standard_io", "arguments": arguments})
    if "jupyter_code" in cue.settings.tools:
        return json.dumps({"name": "jupyter_code", "arguments": {"code": code}})
    return None
