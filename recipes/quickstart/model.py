"""Builds the quickstart's model and tokenizer from nothing: random weights, a byte-level BPE, a chat template.

The result is an ordinary Hugging Face directory (Qwen3 architecture), loaded by the same code as a model from the hub.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from recipes.quickstart.task import demonstrations

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

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


def build(
    directory: Path,
    seed: int,
    hidden_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 24,
    intermediate_size: int = 288,
    vocabulary: int = 303,
    context_length: int = 256,
) -> None:
    """Write config, random weights and tokenizer into ``directory``; 0.36 M parameters with the defaults."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(seed, vocabulary)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            max_position_embeddings=context_length,
            initializer_range=0.5 / hidden_size**0.5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tokenizer(seed: int, vocabulary: int = 303, num_dialogues: int = 3000) -> Any:
    """A byte-level BPE trained on synthetic dialogues; digits stay single, so that copying a number is copying digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = (
        "\n".join(f"{message['role']}\n{message['content']}" for message in dialogue["messages"])
        for dialogue in islice(demonstrations(seed), num_dialogues)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
