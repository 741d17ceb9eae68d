"""Builds the model of the two demonstrations: the quickstart's size, with a tokenizer for words and one-line functions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from recipes.quickstart.model import CHAT_TEMPLATE
from services.common.importing import load_object
from services.common.tiny import TURN_TOKENS, save_random_model, train_tokenizer

NUM_DIALOGUES = 3000


def build(
    directory: Path, seed: int, dialogues: str, vocabulary: int = 320, context_length: int = 256, **sizes: Any
) -> None:
    """Write config, random weights and tokenizer into ``directory``; ``dialogues`` is the import path of a generator, ``sizes``
    are those of ``save_random_model``."""
    texts = (
        "\n".join(message["content"] for message in dialogue["messages"])
        for dialogue in islice(load_object(dialogues)(seed=0), NUM_DIALOGUES)
    )
    tokenizer = train_tokenizer(
        texts, vocabulary=vocabulary, special_tokens=list(TURN_TOKENS), chat_template=CHAT_TEMPLATE
    )
    save_random_model(directory, tokenizer, seed=seed, context_length=context_length, **sizes)
