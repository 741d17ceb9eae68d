r"""Answers in a box: reads ``\boxed{...}`` and compares the answer with the truth, without any algebra."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.common.records.dataset_rows import BOX, last_boxed
from services.envgateway.rewards.result import CORRECT, WRONG, RewardResult, truth_of, unparsed

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() refuses more digits than 4300


def num_boxes(text: str) -> int:
    return sum(1 for _ in BOX.finditer(text))


def as_integer(text: str) -> int | None:
    """A plain integer; None for other texts, including those that only look like integers.

    >>> as_integer("-12"), as_integer("007"), as_integer("1,000"), as_integer("²")
    (-12, 7, None, None)
    """
    return int(text) if _INTEGER.fullmatch(text) else None


_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_NEXT = rf"\s*(?:[,;]\s*(?:and\s|or\s)?|\band\s|\bor\s)\s*{_NUMBER}"
_CLOSING_NUMBERS = re.compile(rf"{_NUMBER}(?:{_NEXT})+[\s.$()\[\]{{}}\\]*$")
_GROUPED_DIGITS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_CLOSING_LIST = re.compile(r"[\[{][^\[\]{}]*,[^\[\]{}]*[\]}]\W*$")
_MOST_CHARS = 1000  # of the end of a line


def ends_in_bare_list(text: str) -> bool:
    """Whether an unboxed text ends in several numbers: a list of candidates is not an answer.

    >>> ends_in_bare_list("[1, 2, 10000]"), ends_in_bare_list("one of 1, 2 or 3."), ends_in_bare_list("so it is 10,000")
    (True, True, False)
    """
    lines = text.strip().splitlines()
    if not lines:
        return False
    last = lines[-1][-_MOST_CHARS:]
    numbers = _CLOSING_NUMBERS.search(last)
    if numbers and not _GROUPED_DIGITS.fullmatch(numbers[0].strip(" .$()[]{}\\")):
        return True
    return bool(_CLOSING_LIST.search(last))


def compare_plainly(answer: str, truth: str) -> RewardResult | None:
    """A verdict without algebra: equal texts, or two plain integers. None where the comparison needs algebra."""
    if answer == truth:
        return CORRECT
    left, right = as_integer(answer), as_integer(truth)
    if left is None or right is None:
        return None
    return CORRECT if left == right else WRONG


def boxed_match(task: Mapping[str, Any], completion: str) -> RewardResult:
    r"""1 for a well-formed ``\boxed{...}`` equal to the truth (as text, or as an integer); the last box counts."""
    truth = truth_of(task)
    answer = last_boxed(completion)
    if not answer:
        return unparsed("no closed, non-empty box")
    return compare_plainly(answer, truth) or WRONG
