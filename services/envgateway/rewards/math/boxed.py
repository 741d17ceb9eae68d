r"""Answers in a box: reads ``\boxed{...}`` and compares the answer with the truth, without any algebra."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from services.common.records.dataset_rows import BOX, closing_brace, last_boxed
from services.common.text.thoughts import after_thoughts
from services.envgateway.rewards.result import CORRECT, WRONG, RewardResult, truth_of, unparsed

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() refuses more digits than 4300


_JOINING = re.compile(r"[\s$,;&]*+(?:and|or)?+[\s$,;]*+(?:[A-Za-z]\s*+=)?+[\s$]*+")


def final_answers(text: str) -> list[str]:
    r"""The content of the last box, and of those before it with no more than a comma, "and" or "or" between.
    Empty where the last box is empty or not closed.

    >>> final_answers(r"\boxed{4}. No, it is \boxed{5}"), final_answers(r"\boxed{4} or $x=\boxed{5}$"), final_answers("5")
    (['5'], ['4', '5'], [])
    """
    contents: list[str] = []
    begun = len(text)  # of the box behind
    for box in reversed(list(BOX.finditer(text))):
        end = closing_brace(text, box.end())
        if contents and (end is None or not _JOINING.fullmatch(text, end + 1, begun)):
            break
        if end is None or not (content := text[box.end() : end].strip()):
            return []
        contents.insert(0, content)
        begun = box.start()
        if len(contents) > _MOST_BOXES:
            break
    return list(dict.fromkeys(contents))


def as_integer(text: str) -> int | None:
    """A plain integer; None for other texts, including those that only look like integers.

    >>> as_integer("-12"), as_integer("007"), as_integer("1,000"), as_integer("²")
    (-12, 7, None, None)
    """
    return int(text) if _INTEGER.fullmatch(text) else None


_NUMBER = r"\d++(?:[./]\d++)?+"
_BETWEEN = r"(?:(?:\s*+(?:[,;|]|\.{3}|…|\\[lc]?dots\b|\\mid\b|\band\b|\bor\b))++\s*+[+-]?|\s++(?!\d++/))"
_NUMBERS = re.compile(rf"(?<![\w.^])[+-]?{_NUMBER}((?:{_BETWEEN}{_NUMBER})++)?+")
_CLOSING = re.compile(r"(?:\([^()\d]*+\)|[\s.,;:?!…()\[\]{}\\*]|\band so on\b|\betc\b)*+")
_GROUPED_DIGITS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[+-]?\d{1,3}(?:\s+\d{3})+")
_LIST = re.compile(r"[\[{]([^\[\]{}]*+)[\]}]\W*+")
_WRAPPED = re.compile(r"\\text\s*+\{\s*+(and|or)\s*+\}|\\[,;:! ]|[$~]")
_MOST_CHARS = 1000  # of the end of a line
_MOST_BOXES = 100


def ends_in_bare_list(text: str) -> bool:
    """Whether an unboxed text ends in several numbers: a list of candidates is not an answer.

    >>> ends_in_bare_list("[1, 2, 10000]"), ends_in_bare_list("one of 1, 2 or 3."), ends_in_bare_list("so it is 10,000")
    (True, True, False)
    """
    lines = text.strip().splitlines()
    if not lines:
        return False
    last = _WRAPPED.sub(r" \1 ", lines[-1][-_MOST_CHARS:]).strip()
    numbers = deque(_NUMBERS.finditer(last), maxlen=1)
    if numbers and numbers[0][1] and _CLOSING.fullmatch(last, numbers[0].end()):
        return not _GROUPED_DIGITS.fullmatch(numbers[0][0])
    listed = deque(_LIST.finditer(last), maxlen=1)
    return bool(listed) and listed[0].end() == len(last) and "," in listed[0][1]


def compare_plainly(answer: str, truth: str) -> RewardResult | None:
    """A verdict without algebra: equal texts, or two plain integers. None where the comparison needs algebra."""
    if answer == truth:
        return CORRECT
    left, right = as_integer(answer), as_integer(truth)
    if left is None or right is None:
        return None
    return CORRECT if left == right else WRONG


def boxed_match(task: Mapping[str, Any], completion: str) -> RewardResult:
    r"""1 for a well-formed ``\boxed{...}`` equal to the truth (as text, or as an integer); the last box after the thought counts."""
    truth = truth_of(task)
    answer = last_boxed(after_thoughts(completion))
    if not answer:
        return unparsed("no closed, non-empty box")
    return compare_plainly(answer, truth) or WRONG
