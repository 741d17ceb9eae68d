"""Reads the prompt and the reference answer of a dataset row, for the built-in workflows and rewards; names of both.

Used when a dataset is opened, to leave out rows without them, and again when the row is played.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import DatasetError

Row = Mapping[str, Any]


class BuiltInWorkflow(enum.StrEnum):
    """Workflows of the replicas, by the names that a recipe writes."""

    ACTOR_VERIFIER = "actor_verifier"
    AGENT_ENV = "agent_env"  # plays environments of the gateway
    CODEGEN_VERIFIER = "codegen_verifier"
    EXTERNAL_AGENT = "external_agent"
    SINGLE_TURN = "single_turn"
    TOOL_MATH = "tool_math"
    TOOL_USE = "tool_use"
    VERIFIERS = "verifiers"  # plays environments of that package


class BuiltInReward(enum.StrEnum):
    """Rewards of the gateway, by the names that a recipe writes."""

    BOXED = "boxed"
    CODE = "code"
    MATH = "math"
    REASONING_GYM = "reasoning_gym"


class BuiltInTool(enum.StrEnum):
    """Tools of the gateway, by the names that a recipe writes; each runs programs."""

    JUPYTER = "jupyter_code"
    PYTHON = "python"
    PYTHON_WITH_INPUT = "python_code_with_standard_io"


HARBOR = "harbor"  # the gateway's environment of Harbor's tasks, and the column of their rows
PROMPT_FIELDS = ("messages", "prompt", "problem", "question")
ROLES = ("system", "developer", "user", "assistant", "tool")
BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character
TRUTH_FIELDS = ("answer", "ground_truth", "solution")
TEST_KINDS = ("stdin", "call", "assert")


def prompt_in(row: Row, field: str | None, where: str) -> str | list[Mapping[str, Any]]:
    """The text or the messages of a row's prompt; ``DatasetError`` names ``where``.

    >>> prompt_in({"problem": "2+2?", "answer": 4}, None, "row 1")
    '2+2?'
    """
    names = (field,) if field else PROMPT_FIELDS
    found = next((name for name in names if name in row), None)
    if found is None:
        raise DatasetError(f"{where} has no prompt: looked for {', '.join(names)} in {sorted(row)}")
    prompt = row[found]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DatasetError(f"{where}: {found} is empty")
        return prompt
    if prompt is None:
        raise DatasetError(f"{where}: {found} is null")
    if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        if fault := _fault_of(prompt):
            raise DatasetError(f"{where}: {found} {fault}")
        return prompt
    raise DatasetError(f"{where}: {found} is neither text nor a list of messages")


def _fault_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Why a policy cannot answer the messages, with the remedy; empty if it can."""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        told = f"has message {number} of the role {role!r}"
        if role not in ROLES:
            return f"{told}: write one of {', '.join(ROLES)}"
        if role in ROLES[:2] and number > 1:
            return f"{told} behind others: put its text into the first message"
        if role == "user" and not str(message.get("content") or "").strip():
            return f"{told} without text: write it, or leave the message out"
    if role not in ("user", "tool"):
        answer = "leave an answer out, and put its text into a column `answer` if the reward reads it"
        return f"ends with a message of the role {role!r}, and must end with one to answer: {answer}"
    return ""


def truth_in(row: Row) -> Any:
    """The reference answer of a row, in either column layout; None if missing or empty.

    >>> truth_in({"answer": 12}), truth_in({"reward_model": {"ground_truth": "12"}})
    (12, '12')
    """
    nested = row.get("reward_model")
    found = [nested.get("ground_truth")] if isinstance(nested, Mapping) else []
    found += [row.get(name) for name in TRUTH_FIELDS]
    return next(
        (truth for truth in found if truth is not None and not (isinstance(truth, str) and not truth.strip())), None
    )


def last_boxed(text: str) -> str | None:
    r"""The content of the last box, or None without a closed box.

    >>> last_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = None
    for match in BOX.finditer(text):
        start = match.end()
    end = None if start is None else closing_brace(text, start)
    return None if end is None else text[start:end].strip()


def closing_brace(text: str, start: int) -> int | None:
    """The place of the brace that closes the one before ``start``; None without one."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return None
