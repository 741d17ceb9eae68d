"""The calculator task: two-digit arithmetic that a tiny model cannot do in its head but can hand to a tool.

``problems`` are the tasks of the run; ``demonstrations`` are the synthetic, *mostly wrong* dialogues from which the
warm start makes the starting checkpoint. Most demonstrators guess at once; the others call the tool, often with the
wrong operator or operands. About one demonstration in five is right, so the supervised model has seen every move that
its policy needs and learned none of the judgement: that is left to the RL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
OPERANDS = range(10, 100)
NUM_HELD_OUT = 512
_HELD_OUT_SEED = 20_000  # fixed: every run is evaluated on the same problems

Problem = tuple[int, str, int]


def problems(seed: int, split: str = "train", count: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows ``{"id", "messages", "answer"}``: all problems but the held-out 512 in seeded order, or just these, or a fixed random
    ``count`` of them."""
    held_out = _held_out()
    if split == "held_out":
        chosen = sorted(held_out)
        if count is not None:
            chosen = sorted(random.Random(_HELD_OUT_SEED).sample(chosen, count))
    elif split == "train":
        chosen = [p for p in _all_problems() if p not in held_out]
        random.Random(seed).shuffle(chosen)
    else:
        raise ValueError(f"split is {split!r}; write train or held_out")
    for left, word, right in chosen:
        yield {
            "id": f"{left}-{word}-{right}",
            "messages": [{"role": "user", "content": question(left, word, right)}],
            "answer": str(_evaluate(left, OPERATORS[word], right)),
        }


def demonstrations(
    seed: int,
    guess_share: float = 0.6,
    right_operator_share: float = 0.5,
    right_operands_share: float = 0.7,
) -> Iterator[dict[str, Any]]:
    """An endless stream of dialogues ``{"messages": [...], "right": bool}`` of the mostly wrong demonstrator."""
    rng = random.Random(seed)
    held_out = _held_out()
    while True:
        left, word, right = rng.choice(OPERANDS), rng.choice(list(OPERATORS)), rng.choice(OPERANDS)
        if (left, word, right) in held_out:
            continue
        truth = _evaluate(left, OPERATORS[word], right)
        messages = [{"role": "user", "content": question(left, word, right)}]
        if rng.random() < guess_share:
            answer = _guess(rng, word)
        else:
            operator = OPERATORS[word] if rng.random() < right_operator_share else rng.choice(list(OPERATORS.values()))
            if rng.random() >= right_operands_share:
                left, right = _slip(rng, left, right)
            answer = _evaluate(left, operator, right)
            messages.append({"role": "assistant", "content": f"<tool_call>print({left}{operator}{right})</tool_call>"})
            messages.append({"role": "tool", "content": str(answer)})
        messages.append({"role": "assistant", "content": rf"\boxed{{{answer}}}"})
        yield {"messages": messages, "right": answer == truth}


def question(left: int, word: str, right: int) -> str:
    return f"What is {left} {word} {right}?"


def _all_problems() -> list[Problem]:
    return [(left, word, right) for left in OPERANDS for word in OPERATORS for right in OPERANDS]


def _held_out() -> set[Problem]:
    return set(random.Random(_HELD_OUT_SEED).sample(_all_problems(), NUM_HELD_OUT))


def _evaluate(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _guess(rng: random.Random, word: str) -> int:
    """A number of the right size, drawn without looking at the operands."""
    return _evaluate(rng.choice(OPERANDS), OPERATORS[word], rng.choice(OPERANDS))


def _slip(rng: random.Random, left: int, right: int) -> tuple[int, int]:
    """One or both operands miscopied."""
    if rng.random() < 0.5:
        return rng.choice(OPERANDS), right
    return left, rng.choice(OPERANDS)
