"""The starting model of the recipe: it has seen the form of the task `spell_backward` of reasoning-gym, and mostly copies.

Demonstrations use strings of random letters, no words of the task. More than half write the string as it is, others write it
backward with a slip, and one in five is right.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.quickstart.model import tokenizer_of
from services.common.tiny import save_random_model

_PROMPT = "Spell this word backward (example: sun -> nus): {}"  # the package's question
_TOKENIZER_DIALOGUES = 2000
_CAPITAL_SHARE = 0.1  # the package's words have names among them


def build(directory: Path, seed: int, vocabulary: int = 300, **sizes: Any) -> None:
    """Write config, random weights and tokenizer. ``sizes`` are those of ``save_random_model``. The tokenizer learns the
    question's words; letters of a string stay tokens of their own."""
    tokenizer = tokenizer_of(islice(demonstrations(seed), _TOKENIZER_DIALOGUES), vocabulary)
    save_random_model(directory, tokenizer, seed=seed, **sizes)


def demonstrations(
    seed: int, min_length: int = 3, max_length: int = 5, copied_share: float = 0.55, right_share: float = 0.2
) -> Iterator[dict[str, Any]]:
    """An endless stream of dialogues ``{"messages": [...]}``: copied, right, or backward with a slip."""
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))
        if rng.random() < _CAPITAL_SHARE:
            word = word.capitalize()
        draw = rng.random()
        if draw < copied_share:
            answer = word
        elif draw < copied_share + right_share:
            answer = word[::-1]
        else:
            answer = _with_slip(word[::-1], rng)
        yield {
            "messages": [
                {"role": "user", "content": _PROMPT.format(word)},
                {"role": "assistant", "content": answer},
            ]
        }


def _with_slip(text: str, rng: random.Random) -> str:
    """Two neighbouring letters swapped."""
    place = rng.randrange(len(text) - 1)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
