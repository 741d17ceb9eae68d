"""Golden tables: parsing of test cases, second tries, the verifier's reward."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.workflows.base import CaseOutcome, JudgeCase, ProgramStatus
from services.inference.workflows.codegen import (
    entry_point_of,
    read_cases,
    report,
    without_examples,
)

ONE = '{"input": "1", "output": "2"}'
PAIR = [("1", "2"), ("3", "4")]
TWO = '[{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]'


def fenced(text: str, language: str = "json") -> str:
    return f"```{language}\n{text}\n```"


@pytest.mark.parametrize(
    ("text", "cases", "left_out"),
    [
        (f"Here: {fenced(TWO)}", PAIR, 0),
        (fenced(TWO, ""), PAIR, 0),
        (fenced(ONE), PAIR[:1], 0),
        (fenced(f'{{"test_cases": {TWO}}}'), PAIR, 0),
        (fenced(f'{{"tests": {TWO}, "why": "x"}}'), PAIR, 0),
        (f"{fenced(ONE)} better: {fenced(TWO)}", PAIR, 0),
        (f"{fenced(TWO)} checked with {fenced('print(1)', 'python')}", PAIR, 0),
        (f"{fenced(TWO)} and {fenced('[]')}", PAIR, 0),
        (f"<think>{fenced(ONE)}</think>{fenced(TWO)}", PAIR, 0),
        (f"<think>{fenced(TWO)}", [], 0),
        (TWO, [], 0),
        (f"```json\n{TWO}", [], 0),
        (fenced(TWO[:-3]), [], 0),
        (fenced(TWO.replace('"', "'")), [], 0),
        (fenced('[{"input": "1", "output": NaN}]'), [], 0),
        (fenced("[" * 100_000), [], 0),
        (fenced("7"), [], 0),
        ("", [], 0),
        (fenced('[{"input": "1", "output": "2"}, {"input": "3"}]'), PAIR[:1], 1),
        (fenced('[{"input": 1, "output": "2"}, "x", null, {"input": "3", "output": "4"}]'), PAIR[1:], 3),
        (fenced(f"[{ONE}, {ONE}, " + '{"input": "3", "output": "4"}, {"input": "5", "output": "6"}]'), PAIR, 2),
        (fenced('[{"input": ["1", "2"], "output": "3", "reason": "sum"}]'), [("1\n2", "3")], 0),
        (fenced('[{"stdin": "1", "expected_output": "2"}]'), PAIR[:1], 0),
        (fenced('[{"input": "\\ud800", "output": "2"}]'), [], 1),
        (fenced(json.dumps([{"input": "x" * 70_000, "output": "2"}])), [], 1),
    ],
)
def test_cases_of_a_program_are_read(text: str, cases: list[tuple[str, str]], left_out: int) -> None:
    read = read_cases(text, is_function=False, num_cases=max(len(cases), 1))
    assert [(case.given, case.expected) for case in read.cases] == cases
    assert read.num_left_out == left_out and bool(read.problem) is not bool(cases)


@pytest.mark.parametrize(
    ("text", "cases", "left_out"),
    [
        ('[{"args": [1, [2]], "expected": {"a": null}}]', [([1, [2]], {"a": None})], 0),
        ('[{"args": [], "expected": null}]', [([], None)], 0),
        ('[{"args": [1], "expected": true}, {"args": [1], "expected": 1}]', [([1], True), ([1], 1)], 0),
        ('[{"args": [123456789012345678901234567890], "expected": 0}]', [([123456789012345678901234567890], 0)], 0),
        ('[{"input": [3], "output": 4}]', [([3], 4)], 0),
        ('[{"args": 3, "expected": 4}, {"args": {"a": 3}, "expected": 4}, {"args": [3]}]', [], 3),
    ],
)
def test_cases_of_a_function_are_read(text: str, cases: list[tuple[Any, Any]], left_out: int) -> None:
    read = read_cases(fenced(text), is_function=True, num_cases=max(len(cases), 1))
    assert [(case.given, case.expected) for case in read.cases] == cases
    assert read.num_left_out == left_out


@given(
    text=st.text(alphabet=st.sampled_from('```json\n[{"input": 1}]<think></'), max_size=200),
    num_cases=st.integers(1, 3),
)
def test_whatever_is_written_is_read_without_failing(text: str, num_cases: int) -> None:
    for is_function in (False, True):
        assert len(read_cases(text, is_function=is_function, num_cases=num_cases).cases) in (0, num_cases)


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        ({"kind": "stdin", "cases": []}, ""),
        ({"kind": "call", "entry_point": "add", "cases": []}, "add"),
        ({"kind": "assert", "entry_point": "add", "tests": "assert add(1, 2) == 3"}, "add"),
        ({"kind": "assert", "entry_point": "", "tests": "def check(candidate):\n    ...\n\ncheck(Solution().add)"}, "Solution().add"),
        ({"kind": "assert", "entry_point": "", "tests": "assert add(1, 2) == 3"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_how_programs_are_called(tests: dict[str, Any], entry_point: str | None) -> None:
    assert entry_point_of(tests) == entry_point


OK, WRONG = CaseOutcome(verdict=ProgramStatus.OK), CaseOutcome(verdict=ProgramStatus.WRONG_ANSWER)


def test_what_a_program_did_is_told_case_by_case() -> None:
    cases = [JudgeCase(given=f"{n}\n", expected=str(n)) for n in range(5)]
    outcomes = [
        OK,
        CaseOutcome(verdict=ProgramStatus.WRONG_ANSWER, stdout="7\n", detail="line 1"),
        CaseOutcome(verdict=ProgramStatus.RUNTIME_ERROR, stderr="Traceback\nKeyError: 1", detail="KeyError: 1"),
        CaseOutcome(verdict=ProgramStatus.TIME_LIMIT),
        CaseOutcome(verdict=ProgramStatus.WRONG_ANSWER),
    ]
    assert report(cases, outcomes, max_chars=100).split("\n\n") == [
        "Case 1\ninput:\n0\nexpected:\n0\nyour program passed",
        "Case 2\ninput:\n1\nexpected:\n1\nyour program printed:\n7",
        "Case 3\ninput:\n2\nexpected:\n2\nyour program ended with an error:\nTraceback\nKeyError: 1",
        "Case 4\ninput:\n3\nexpected:\n3\nyour program was stopped: it took too long",
        "Case 5\ninput:\n4\nexpected:\n4\nyour program printed:\n(nothing)",
    ]


def test_a_call_is_told_with_arguments_and_value_and_long_texts_are_cut() -> None:
    case = JudgeCase(given=[list(range(200))], expected=1)
    wrong = CaseOutcome(verdict=ProgramStatus.WRONG_ANSWER, detail="expected 1, got 2")
    told = report([case], [wrong], max_chars=60)
    assert "arguments:\n[[0, 1," in told and "(cut)" in told and len(told) < 250
    assert told.endswith("your program gave another answer:\nexpected 1, got 2")


# -- Only the examples are removed from a problem's text.


@pytest.mark.parametrize(
    ("problem", "left"),
    [
        ("Add.\n\nInput\n\nTwo numbers.\n\nOutput\n\nTheir sum.\n\nExample\n\nInput\n\n1 2\n\nOutput\n\n3\n\nNote\n\n1 + 2 is 3.",
         "Add.\n\nInput\n\nTwo numbers.\n\nOutput\n\nTheir sum.\n"),
        ("Add.\n\nExamples\n\nInput\n1 2\nOutput\n3\n\nTime Limit: 2 s\nMemory Limit: 1 MB",
         "Add.\n\nTime Limit: 2 s\nMemory Limit: 1 MB"),
        ("Add.\n\n-----Constraints-----\n - small\n\n-----Sample Input-----\n1 2\n\n-----Sample Output-----\n3\n\nAs you see.",
         "Add.\n\n-----Constraints-----\n - small\n"),
        ("Add.\n\n**Example 1:**\n\nInput: a = 1\nOutput: 1\n\n**Example 2:**\n\nInput: a = 2\n\n**Constraints:**\n\n* small",
         "Add.\n\n**Constraints:**\n\n* small"),
        ("Add.\n### Sample Input 2\n1\n### Sample Output 2\n1\n### Constraints\nsmall", "Add.\n### Constraints\nsmall"),
        ("Add.\nExample: add(1, 2) gives 3.\nMore of it.", "Add."),
        ("Add.\n\nExample\n1 2\n3\n\nStarter code:\n\n```python\ndef add(a, b):\n```",
         "Add.\n\nStarter code:\n\n```python\ndef add(a, b):\n```"),
        ("Add.\n\nExample\n\n```\n1 2\n```\n\nComplete:\n```python\ndef add(a, b):\n```", "Add.\n\n```python\ndef add(a, b):\n```"),
        ('def add(a, b):\n    """Add.\n    >>> add(1, 2)\n    3\n    >>> add(2, 2)\n    4\n    """\n',
         'def add(a, b):\n    """Add.\n    """'),
        ('def add(a, b):\n    """Add.\n\n    Examples:\n    add(1, 2) ➞ 3\n    """\n    pass', 'def add(a, b):\n    """Add.\n\n    """\n    pass'),
        ('def add(a, b):\n    """\n    >>> add(1, 2)\n    3\n\n    Numbers are whole.\n    """', 'def add(a, b):\n    """\n\n    Numbers are whole.\n    """'),
    ],
    ids=["codeforces", "limits", "atcoder", "leetcode", "markdown", "inline", "starter code", "code", "doctest", "docstring", "after a doctest"],
)  # fmt: skip
def test_examples_leave(problem: str, left: str) -> None:
    assert without_examples(problem) == left.rstrip("\n")


@pytest.mark.parametrize(
    "problem",
    [
        "Add two numbers.\n\n\n\nInput Format:\nTwo numbers.",
        "For example, 1 and 2 make 3. Examples of numbers are 1 and 2.",
        "Example\n\n1 2\n\n3",
        "A sample is a number. Output the sample mean.",
        "Print the example that was chosen.\nInput\nA sample input of a filter",
        "",
    ],
)
def test_a_problem_without_headed_examples_stays_as_it_is(problem: str) -> None:
    assert without_examples(problem) == problem
