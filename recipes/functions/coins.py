"""``recipes/quickstart-two-policies``: a specification that leaves one thing open, and a checker that reads test logs.

    f(x): add 3 or 2

Hidden tests accept one of the two, and the sentence does not say which: a policy with one attempt is right half of the
time, with any training. Two policies do better together: the actor writes a function; the verifier is shown the output
of the tests and says approve or reject; after a rejection the actor, which is shown its attempt, tries once more.

``demonstrations`` and ``verifications`` make the starting checkpoints. The actor's demonstrator writes either number,
and changes the answer after a rejection seven times out of ten; the verifier's verdict agrees with the log three times
out of five.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from services.common.records import Task
from services.inference.workflows.base import Gateway, ProgramStatus, fill

WORDS = {"add": "+", "subtract": "-", "times": "*"}
PAIRS = ((2, 3), (4, 5), (6, 7), (8, 9))  # one of a pair is accepted
RETRY_PROMPT = "{problem}\n{solution}\nwas rejected"  # what the actor reads after a rejection
VERIFY_PROMPT = "{problem}\n{solution}\n{evidence}"  # what the verifier reads; evidence is the test log
INPUTS = (2, 7)
REPEATS = 12  # with other coins each time
_HELD_OUT_SEED = 20_002  # fixed: every run is evaluated on the same coins

Spec = tuple[str, int, int]  # word and the two numbers


def problems(seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows ``{"id", "messages", "tests"}``. The accepted number is drawn for each row: the held-out rows differ in the
    coins, the only unknown of a task."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}; write train or held_out")
    coin = random.Random(_HELD_OUT_SEED if split == "held_out" else seed)
    specs = _all_specs() * (REPEATS if split == "train" else REPEATS // 3)
    coin.shuffle(specs)
    for number, spec in enumerate(specs):
        word, first, second = spec
        accepted = coin.choice((first, second))
        cases = [{"args": [value], "expected": _apply(word, accepted, value)} for value in INPUTS]
        yield {
            "id": f"{number}-{word}-{first}-{second}",
            "messages": [_user(sentence(spec))],
            "tests": {"kind": "call", "entry_point": "f", "cases": cases},
        }


def demonstrations(seed: int, switch_share: float = 0.7) -> Iterator[dict[str, Any]]:
    """The actor's dialogues: a first attempt, either number; or one after a rejection, the other number a little more often
    than the same again."""
    rng = random.Random(seed)
    specs = _all_specs()
    while True:
        word, first, second = spec = rng.choice(specs)
        question = sentence(spec)
        number = rng.choice((first, second))
        if rng.random() < 0.5:
            question = fill(RETRY_PROMPT, problem=question, solution=program(word, number))
            if rng.random() < switch_share:
                number = first + second - number
        yield {"messages": [_user(question), _assistant(program(word, number))]}


def verifications(seed: int, right_share: float = 0.6) -> Iterator[dict[str, Any]]:
    """The verifier's dialogues: a test log, and a verdict that agrees with the log in little more than half of the
    cases."""
    rng = random.Random(seed)
    specs = _all_specs()
    while True:
        word, first, second = spec = rng.choice(specs)
        written, accepted = rng.choice((first, second)), rng.choice((first, second))
        prompt = fill(
            VERIFY_PROMPT,
            problem=sentence(spec),
            solution=program(word, written),
            evidence="\n".join(_line(value, written == accepted) for value in INPUTS),
        )
        verdict = "approve" if (written == accepted) == (rng.random() < right_share) else "reject"
        yield {"messages": [_user(prompt), _assistant(f"<verdict>{verdict}</verdict>")]}


def both(seed: int) -> Iterator[dict[str, Any]]:
    """Dialogues of actor and verifier in turn, for a tokenizer that serves both."""
    for pair in zip(demonstrations(seed), verifications(seed), strict=True):
        yield from pair


def sentence(spec: Spec) -> str:
    """
    >>> sentence(("add", 3, 5))
    'f(x): add 3 or 5'
    """
    word, first, second = spec
    return f"f(x): {word} {first} or {second}"


def program(word: str, number: int) -> str:
    """
    >>> program("add", 3)
    'def f(x): return x+3'
    """
    return f"def f(x): return x{WORDS[word]}{number}"


async def test_log(gateway: Gateway, task: Task, solution: str) -> str:
    """The output of the hidden tests for an attempt, run in the gateway's sandbox."""
    cases = [(case["args"][0], case["expected"]) for case in task.data["tests"]["cases"]]
    checks = [f"print({_line(value, True)!r} if f({value}) == {expected} else {_line(value, False)!r})"
              for value, expected in cases]  # fmt: skip
    done = await gateway.execute_code("\n".join([solution, *checks]))
    if done.status is not ProgramStatus.OK:
        return "\n".join(_line(value, False) for value, _ in cases)  # it could not even be run
    return done.stdout.strip()


def _line(value: int, passed: bool) -> str:
    return f"f({value}) {'ok' if passed else 'FAIL'}"


def _apply(word: str, number: int, value: int) -> int:
    return {"add": value + number, "subtract": value - number, "times": value * number}[word]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _all_specs() -> list[Spec]:
    """Both orders of every pair."""
    return [(word, *numbers) for word in WORDS for pair in PAIRS for numbers in (pair, pair[::-1])]
