"""Makes Hugging Face models in a second: random weights, a byte-level tokenizer, a chat template.

For trying a recipe without its model: the directory is an ordinary one and is loaded by the same code. Any text can be
encoded and decoded, because the tokenizer spells text without merges in bytes (beside a Qwen2 model, transformers
brings text into Unicode's composed form first, as Qwen's own tokenizer does). Independent of recipes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from services.common.errors import ConfigError

_HERE = Path(__file__).parent

Kind = Literal["qwen3", "qwen2"]
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING_TOKENS = ("<think>", "</think>")
QWEN_TOKENS = ("<|endoftext|>",)  # transformers adds it to every tokenizer that lies beside a Qwen2 model


def build(directory: Path, seed: int, kind: Kind = "qwen3", vocabulary: int = 1024) -> None:
    """Write config, random weights and tokenizer into ``directory``; 0.3 M parameters.

    The tokenizer learns its merges from a page of our own text: prose, formulas, programs, rooms, shops. The template has the
    turn layout of Qwen's models: tools listed in the system turn, neighbouring tool results in one user turn, thoughts of
    earlier turns left out, and an empty thought where thinking is switched off.
    """
    tokenizer = train_tokenizer(
        ["\n" + (_HERE / "tiny_text.txt").read_text(encoding="utf-8")],
        vocabulary=vocabulary,
        special_tokens=[*TURN_TOKENS, *TOOL_TOKENS, *THINKING_TOKENS, *QWEN_TOKENS],
        chat_template="\n" + (_HERE / "tiny_chat.jinja").read_text(encoding="utf-8"),
    )
    save_random_model(directory, tokenizer, seed=seed, kind=kind, num_layers=2)


def save_random_model(
    directory: Path,
    tokenizer: Any,
    *,
    seed: int,
    kind: Kind = "qwen3",
    hidden_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 24,
    intermediate_size: int = 288,
    context_length: int = 32768,
    rope_theta: float = 10_000.0,
) -> None:
    """Save the tokenizer and a causal language model of its vocabulary with seeded random weights and tied embeddings.

    ``rope_theta`` is the base of the rotary position embedding: a low one tells positions of a short context apart sooner.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": context_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "initializer_range": 0.5 / hidden_size**0.5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "qwen3":
        config = Qwen3Config(head_dim=head_dim, **sizes)
    elif kind == "qwen2":
        config = Qwen2Config(**sizes)
    else:
        raise ConfigError(f"there is no tiny model of kind {kind!r}; write qwen3 or qwen2")
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], *, vocabulary: int, special_tokens: Sequence[str], chat_template: str) -> Any:
    """A byte-level BPE with ``<|im_end|>`` at the end of turns; digits stay single, so that copying a number is copying
    digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=list(special_tokens),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


# --- Rows with reference answers for trying a recipe without its data, and for environments.


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
