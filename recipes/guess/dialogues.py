"""The starting model of the game: it names a number in each turn, and heeds the hints in a third of its turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.quickstart.model import tokenizer_of
from services.common.tiny import save_random_model

TURNS = 4
_TOKENIZER_DIALOGUES = 200


def build(directory: Path, seed: int, vocabulary: int = 290, **sizes: Any) -> None:
    """Write config, random weights and tokenizer. ``sizes`` are those of ``save_random_model``. Roles, hints and the question
    are few tokens, so that a game is short."""
    tokenizer = tokenizer_of(islice(demonstrations(seed), _TOKENIZER_DIALOGUES), vocabulary)
    save_random_model(directory, tokenizer, seed=seed, **sizes)


def episodes(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Rows ``{"id"}``: places for episodes that a server draws."""
    yield from ({"id": str(number)} for number in range(count))


def demonstrations(seed: int, most: int = 8, heed_share: float = 0.3) -> Iterator[dict[str, Any]]:
    """An endless stream of dialogues ``{"messages", "right"}``; a guess fits the hints so far in ``heed_share`` of the turns,
    and is any number otherwise."""
    rng = random.Random(seed)
    while True:
        number, low, high = rng.randint(1, most), 1, most
        messages = [{"role": "user", "content": f"1 to {most}?"}]
        for _ in range(TURNS):
            heeds = rng.random() < heed_share and low <= high
            guess = rng.randint(low, high) if heeds else rng.randint(1, most)
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                break
            if guess < number:
                low = max(low, guess + 1)
                messages.append({"role": "user", "content": "higher"})
            else:
                high = min(high, guess - 1)
                messages.append({"role": "user", "content": "lower"})
        if messages[-1]["role"] == "user":
            messages.pop()
        yield {"messages": messages, "right": messages[-1]["content"] == str(number)}
