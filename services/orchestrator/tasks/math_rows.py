"""Converts math problems into one form: ``{"problem": text, "answer": text}``.

Input layouts: the columns ``problem`` or ``question`` with ``answer``, ``prompt`` (messages or text) with
``reward_model.ground_truth``, and ``prompt`` with ``solutions``. An answer may be a number or text; GSM8K's follows
``####``, and an answer inside ``\boxed{}`` loses the box. The instruction that verl's preparations append to every
prompt is removed, and so is the frame around DAPO's problems: the recipe has its own instruction. Refuses every other layout, without guesses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from services.common.dataset_rows import closing_brace
from services.common.errors import DatasetError

Row = Mapping[str, Any]
_PROBLEM_COLUMNS = ("problem", "question")
_CHAT_MARKS = re.compile(r"<｜[A-Za-z▁]+｜>")  # role marks of a chat template that was applied to the text
_INSTRUCTION = re.compile(
    r"(?<!\s)(?<!\\n)(?:\\n|\s)*+Let['’]?s think step by step and output the final answer within \\boxed\{\}\.?\s*\Z".replace(
        " ", r"\s+"
    ),
    re.IGNORECASE,
)
_FRAME = re.compile(  # DAPO's, in the forms in which it is passed on
    r"\A(?:Solve the following math problem step by step\.\s*)?"
    r"(?:The last line of your response should be of the form:?\s+\W?Answer:\s*\S{1,40}\s+(?:\(without quotes\)\s+)?"
    r"where\s+\S{1,40}\s+is the answer to the problem\.?\s*)?|"
    r"Remember to put your answer on its own line(?:\s+after\s+\W?Answer:\W?)?"
    r"(?:,? and you do not need to use a \\?\\boxed command)?\.?\Z",
    re.IGNORECASE,
)
_KEPT = ("level", "subject", "difficulty", "url")


def math_row(row: Row, where: str) -> dict[str, Any]:
    """The row in one form; ``DatasetError`` names ``where`` and what is missing.

    >>> math_row({"question": "2+2?", "answer": 4.0}, "row 1")
    {'problem': '2+2?', 'answer': '4'}
    """
    normal: dict[str, Any] = {"problem": _problem(row, where), "answer": _answer(row, where)}
    return normal | {name: row[name] for name in _KEPT if name in row}


def answer_text(value: Any, where: str) -> str:
    """An answer as text: integers without a decimal point, other floats as they print.

    >>> [answer_text(value, "row 1") for value in (70, 27.0, 2.5, " 204 ")]
    ['70', '27', '2.5', '204']
    """
    if isinstance(value, bool) or value is None:
        raise DatasetError(f"{where}: the answer is {'null' if value is None else value}; it must be a number or text")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DatasetError(f"{where}: the answer is {value}; it must be finite")
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, (int, Decimal)):
        return str(value)
    if not isinstance(value, str):
        raise DatasetError(f"{where}: the answer is a {type(value).__name__}; it must be a number or text")
    text = value.rpartition("####")[2].replace(",", "") if "####" in value else value
    text = (_unboxed(text) or text).strip()
    if not text:
        raise DatasetError(f"{where}: the answer is empty")
    return text


def _problem(row: Row, where: str) -> str:
    for name in _PROBLEM_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            return _unframed(row[name])
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        last = prompt[-1]
        if isinstance(last, Mapping) and last.get("role") == "user" and isinstance(last.get("content"), str):
            return _unframed(_INSTRUCTION.sub("", str(last["content"])))
        raise DatasetError(f"{where}: prompt must end with a user message that has text")
    if isinstance(prompt, str) and prompt.strip():
        return _unframed(_INSTRUCTION.sub("", _CHAT_MARKS.sub("", prompt)))
    raise DatasetError(f"{where}: no problem: looked for problem, question and prompt in {sorted(row)}")


def _unframed(text: str) -> str:
    text = text.strip()
    return _FRAME.sub("", text).strip() or text


def _answer(row: Row, where: str) -> str:
    if "answer" in row:
        return answer_text(row["answer"], where)
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return answer_text(reward_model["ground_truth"], where)
    solutions = row.get("solutions")
    if isinstance(solutions, list) and solutions:
        return answer_text(solutions[0], where)
    raise DatasetError(
        f"{where}: no answer: looked for answer, reward_model.ground_truth and solutions in {sorted(row)}"
    )


def _unboxed(text: str) -> str | None:
    """The contents of the last box, when the text ends with that box."""
    begin = text.rfind("\\boxed{") + len("\\boxed{")
    ends = begin >= len("\\boxed{") and closing_brace(text, begin) == len(text.rstrip()) - 1
    return text.rstrip()[begin:-1] if ends else None
