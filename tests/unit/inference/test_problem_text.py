"""Only the examples are removed from a problem's text."""

from __future__ import annotations

import pytest

from services.inference.workflows.codegen import without_examples


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
