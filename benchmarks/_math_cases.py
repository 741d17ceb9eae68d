"""Cases for benchmarks/math_reward.py, by seed: answers of real rows inside free-form completions.

A case has the reference answer, a completion, and the verdict of a strict grader, if known.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

ROWS = {
    "math500": "math500/test.jsonl",
    "aime24": "aime24/test.jsonl",
    "aime25": "aime25/test.jsonl",
    "amc23": "amc23/test.jsonl",
    "math_train": "math_train/train.jsonl",
}
_STEPS = (
    "First we set up the equation and simplify both sides.",
    "We have ${a} + {b} = {c}$, so the first case gives {c}.",
    "Let $x = {a}$. Then $2x = {d}$ and we continue.",
    "Note that {a} is not possible, because it exceeds {b}.",
    "By symmetry there are {a} ways for the first and {b} for the second.",
    "Checking small values: {a}, {b}, and so on.",
)
_PROSE = (
    "Therefore, the final answer is ${answer}$. I hope it is correct.",
    "So the answer is ${answer}$.",
    "Hence we conclude that the final answer is: ${answer}$",
    "Thus the result is\n$${answer}$$",
)
_PLAIN = ("The answer is {answer}.", "So we get {answer}", "Final answer: {answer}.")


@dataclass(frozen=True, slots=True)
class Case:
    """``right`` is None where only Math-Verify knows."""

    kind: str
    truth: str
    completion: str
    right: bool | None


def rows(data: Path) -> list[tuple[str, str]]:
    """Data set and reference answer of every row."""
    found = []
    for name, path in ROWS.items():
        for line in (data / path).read_text().splitlines():
            answer = str(json.loads(line)["answer"]).strip()
            if answer:
                found.append((name, answer))
    return found


def completions(data: Path, num: int, seed: int) -> list[Case]:
    """``num`` completions: each of the four small sets whole, then MATH train; every form in turn."""
    rng = random.Random(seed)
    all_rows = rows(data)
    small = [row for row in all_rows if row[0] != "math_train"]
    large = [row for row in all_rows if row[0] == "math_train"]
    rng.shuffle(large)
    truths = [truth for _, truth in small + large]
    cases: list[Case] = []
    while len(cases) < num:
        for truth in truths:
            make = _FORMS[len(cases) % len(_FORMS)]
            cases.append(make(rng, truth, truths))
            if len(cases) == num:
                break
    rng.shuffle(cases)
    return cases


def _reasoning(rng: random.Random) -> str:
    a, b = rng.randrange(2, 99), rng.randrange(2, 99)
    steps = rng.sample(_STEPS, rng.randrange(1, 4))
    return " ".join(step.format(a=a, b=b, c=a + b, d=2 * a) for step in steps) + "\n"


def _boxed(rng: random.Random, truth: str, _: list[str]) -> Case:
    ends = ("So the answer is $\\boxed{{{}}}$.", "\\boxed{{{}}}", "Thus $x = \\boxed{{{}}}$ as desired.")
    return Case("boxed", truth, _reasoning(rng) + rng.choice(ends).format(truth), True)


def _prose(rng: random.Random, truth: str, _: list[str]) -> Case:
    return Case("prose", truth, _reasoning(rng) + rng.choice(_PROSE).replace("{answer}", truth), None)


def _plain(rng: random.Random, truth: str, _: list[str]) -> Case:
    return Case("plain", truth, _reasoning(rng) + rng.choice(_PLAIN).format(answer=truth), None)


def _reformulated(rng: random.Random, truth: str, _: list[str]) -> Case:
    value = _number(truth)
    forms: list[str] = []
    if value is not None:
        p, q = value.numerator, value.denominator
        k = rng.randrange(2, 9)
        forms = [f"\\frac{{{p * k}}}{{{q * k}}}", f"{p * k}/{q * k}", f"\\dfrac{{{p}}}{{{q}}}"]
        if q == 1:
            forms += [f"{p}.0", f"{p:,}", f"{p + k} - {k}", f"\\text{{{p}}}"]
        elif 10**6 % q == 0:
            forms.append(str(p / q))
    elif "frac" in truth or "sqrt" in truth:
        forms = [truth.replace("\\frac", "\\dfrac"), f"1 \\cdot \\left({truth}\\right)", f"{{{truth}}}"]
    else:
        forms = [truth.replace("(", "\\left(").replace(")", "\\right)"), f"\\ {truth}\\ ", f"{truth}."]
    form = rng.choice(forms)
    end = rng.choice((f"\\boxed{{{form}}}", rng.choice(_PROSE).replace("{answer}", form)))
    return Case("reformulated", truth, _reasoning(rng) + end, None)


def _wrong(rng: random.Random, truth: str, truths: list[str]) -> Case:
    value = _number(truth)
    if value is not None and rng.random() < 0.7:
        other = value + rng.choice((1, -1, 10, Fraction(1, 2), value + 1))
        wrong, right = _latex(other if other != value else value + 3), False
    else:
        wrong, right = rng.choice(truths), None
    mention = f"One might expect ${truth}$ at first, but that is not so. " if rng.random() < 0.3 else ""
    end = rng.choice((f"\\boxed{{{wrong}}}", rng.choice(_PROSE).replace("{answer}", wrong)))
    return Case("wrong", truth, _reasoning(rng) + mention + end, right)


def _none(rng: random.Random, truth: str, _: list[str]) -> Case:
    ends = ("I could not find the answer.", "\\boxed{", "", "I ran out of ideas here, sorry.")
    return Case("none", truth, rng.choice(ends), False)


_Form = Callable[[random.Random, str, list[str]], Case]
_FORMS: tuple[_Form, ...] = (
    _boxed,
    _prose,
    _reformulated,
    _wrong,
    _boxed,
    _plain,
    _reformulated,
    _wrong,
    _prose,
    _none,
)


def _number(text: str) -> Fraction | None:
    match = re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", text)
    if match and int(match[3]):
        return Fraction(int(match[2]), int(match[3])) * (-1 if match[1] else 1)
    return Fraction(text) if re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text) else None


def _latex(value: Any) -> str:
    fraction = Fraction(value)
    sign = "-" if fraction < 0 else ""
    if fraction.denominator == 1:
        return str(fraction)
    return f"{sign}\\frac{{{abs(fraction.numerator)}}}{{{fraction.denominator}}}"
