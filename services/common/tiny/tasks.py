"""Rows with reference answers for trying a recipe without its data, and for environments.

Generators as ``data.train.generator`` wants them: deterministic, in the form that the datasets' own rows are brought into.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "answer"}``.

    >>> next(sums(seed=1))["problem"]
    'What is $147 + 592$?'
    """
    draw = random.Random(seed)
    for number in itertools.count():
        left, right = draw.randrange(10, 1000), draw.randrange(10, 1000)
        yield {"id": f"sum-{number}", "problem": f"What is ${left} + {right}$?", "answer": str(left + right)}


def programs(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "tests", "solution"}``: programs that read a number and print another."""
    draw = random.Random(seed)
    for number in itertools.count():
        factor, term = draw.randrange(2, 20), draw.randrange(1, 100)
        inputs = [draw.randrange(-50, 50) for _ in range(3)]
        cases = [{"stdin": f"{x}\n", "expected": f"{x * factor + term}\n"} for x in inputs]
        yield {
            "id": f"program-{number}",
            "problem": f"Read a whole number from standard input, multiply it by {factor}, add {term}, and print the result.",
            "tests": {"kind": "stdin", "cases": cases},
            "solution": f"print(int(input()) * {factor} + {term})\n",
        }


def places(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``{"id", "index", "messages"}``: the first tasks of an environment, by their place in its own list."""
    for index in range(count):
        yield {"id": str(index), "index": index, "messages": []}


def games(seed: int, data: str) -> Iterator[dict[str, Any]]:
    """``{"id", "game", "messages", "expert"}``: ALFWorld's games below a folder with the commands that win them, those
    with the shortest way first."""
    found = []
    for path in Path(data).rglob("game.tw-pddl"):
        walkthrough = json.loads(path.read_text(encoding="utf-8")).get("walkthrough")
        if walkthrough:
            found.append((len(walkthrough), path.relative_to(data).as_posix(), list(walkthrough)))
    for _, game, walkthrough in sorted(found):
        yield {"id": game, "game": game, "messages": [], "expert": walkthrough}
