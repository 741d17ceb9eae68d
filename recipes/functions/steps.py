"""``recipes/quickstart-code``: translate a sentence to Python, in one or two steps; judged by running the program.

    add 3 then times 7        ->  def f(x): return (x + 3) * 7
    double then subtract 5    ->  def f(x): return x * 2 - 5

``problems`` are the tasks of the run, with five hidden inputs each; ``demonstrations`` are the mostly wrong dialogues
of the starting checkpoint: their programs are well formed, and often do another step than the one asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUMBERS = range(2, 10)
NUM_HELD_OUT = 256
_HELD_OUT_SEED = 20_001  # fixed: every run is evaluated on the same problems

Step = tuple[str, int]  # word and number
WORDS = {"add": "+", "subtract": "-", "times": "*"}


def problems(seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows ``{"id", "messages", "tests"}``: all problems but the held-out ones, or just these."""
    held_out = _held_out()
    if split == "held_out":
        chosen = sorted(held_out)
    elif split == "train":
        chosen = [steps for steps in _all_problems() if steps not in held_out]
        random.Random(seed).shuffle(chosen)
    else:
        raise ValueError(f"split is {split!r}; write train or held_out")
    for steps in chosen:
        rng = random.Random(f"{_HELD_OUT_SEED}/{steps}")
        inputs = rng.sample(range(-20, 21), 5)
        cases = [{"args": [value], "expected": _apply(steps, value)} for value in inputs]
        yield {
            "id": "-".join(f"{word}{number}" for word, number in steps),
            "messages": [{"role": "user", "content": sentence(steps)}],
            "tests": {"kind": "call", "entry_point": "f", "cases": cases},
        }


def demonstrations(seed: int, slip_share: float = 0.45) -> Iterator[dict[str, Any]]:
    """An endless stream of dialogues ``{"messages", "right"}``; a step is wrong with probability ``slip_share``."""
    rng = random.Random(seed)
    held_out = _held_out()
    everything = _all_problems()
    while True:
        steps = rng.choice(everything)
        if steps in held_out:
            continue
        written = tuple(_slip(rng, step) if rng.random() < slip_share else step for step in steps)
        yield {
            "messages": [
                {"role": "user", "content": sentence(steps)},
                {"role": "assistant", "content": program(written)},
            ],
            "right": written == steps,
        }


def sentence(steps: tuple[Step, ...]) -> str:
    """
    >>> sentence((("add", 3), ("times", 7)))
    'add 3 then times 7'
    """
    return " then ".join(f"{word} {number}" for word, number in steps)


def program(steps: tuple[Step, ...]) -> str:
    """
    >>> program((("add", 3), ("times", 7)))
    'def f(x): return (x+3)*7'
    """
    expression = "x"
    for word, number in steps:
        inner = expression if expression == "x" else f"({expression})"
        expression = f"{inner}{WORDS[word]}{number}"
    return f"def f(x): return {expression}"


def _all_problems() -> list[tuple[Step, ...]]:
    single = [(word, number) for word in WORDS for number in NUMBERS]
    return [(one,) for one in single] + [(one, two) for one in single for two in single]


def _held_out() -> set[tuple[Step, ...]]:
    pairs = [steps for steps in _all_problems() if len(steps) == 2]
    return set(random.Random(_HELD_OUT_SEED).sample(pairs, NUM_HELD_OUT))


def _apply(steps: tuple[Step, ...], value: int) -> int:
    for word, number in steps:
        value = {"add": value + number, "subtract": value - number, "times": value * number}[word]
    return value


def _slip(rng: random.Random, step: Step) -> Step:
    """Another word or another number."""
    word, number = step
    if rng.random() < 0.5:
        return rng.choice([other for other in WORDS if other != word]), number
    return word, rng.choice([other for other in NUMBERS if other != number])
