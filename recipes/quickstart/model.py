"""Builds the quickstart's model and tokenizer: random weights, a byte-level BPE, a chat template.

The result is an ordinary Hugging Face directory (Qwen3 architecture), loaded by the same code as a model from the hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.quickstart.task import demonstrations
from services.common.tiny import TOOL_TOKENS, TURN_TOKENS, save_random_model, train_tokenizer

# The turn layout of Qwen's models, without the line break between turns: a tool result is a user turn with a
# tool_response tag.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>"
    "{%- else -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def build(directory: Path, seed: int, vocabulary: int = 303, context_length: int = 256, **sizes: Any) -> None:
    """Write config, random weights and tokenizer into ``directory``; 0.36 M parameters with the defaults. ``sizes`` are those
    of ``save_random_model``."""
    save_random_model(directory, build_tokenizer(seed, vocabulary), seed=seed, context_length=context_length, **sizes)


def build_tokenizer(seed: int, vocabulary: int = 303, num_dialogues: int = 3000) -> Any:
    """A byte-level BPE trained on synthetic dialogues."""
    return tokenizer_of(islice(demonstrations(seed), num_dialogues), vocabulary, [*TURN_TOKENS, *TOOL_TOKENS])


def tokenizer_of(
    dialogues: Iterable[Mapping[str, Any]], vocabulary: int, special_tokens: Sequence[str] = TURN_TOKENS
) -> Any:
    """The same, trained on these dialogues: their roles and contents."""
    texts = (
        "\n".join(f"{message['role']}\n{message['content']}" for message in dialogue["messages"])
        for dialogue in dialogues
    )
    return train_tokenizer(
        texts, vocabulary=vocabulary, special_tokens=list(special_tokens), chat_template=CHAT_TEMPLATE
    )
