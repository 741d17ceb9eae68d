"""Rows with reference answers for trying a recipe where none of its data lies on this machine: sums and small programs.

Generators as ``data.train.generator`` wants them: deterministic, in the form that the datasets' own rows are brought into.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "answer"}``.

    >>> next(sums(seed=1))["problem"]
    'What is $147 + 592$?'
    """
    draw = random.Random(seed)
    number = 0
    while True:
        left, right = draw.randrange(10, 1000), draw.randrange(10, 1000)
        yield {"id": f"sum-{number}", "problem": f"What is ${left} + {right}$?", "answer": str(left + right)}
        number += 1


def programs(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "tests", "solution"}``: programs that read a number and print another."""
    draw = random.Random(seed)
    number = 0
    while True:
        factor, term = draw.randrange(2, 20), draw.randrange(1, 100)
        inputs = [draw.randrange(-50, 50) for _ in range(3)]
        cases = [{"stdin": f"{x}\n", "expected": f"{x * factor + term}\n"} for x in inputs]
        yield {
            "id": f"program-{number}",
            "problem": f"Read a whole number from standard input, multiply it by {factor}, add {term}, and print the result.",
            "tests": {"kind": "stdin", "cases": cases},
            "solution": f"print(int(input()) * {factor} + {term})\n",
        }
        number += 1
