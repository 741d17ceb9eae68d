"""Tiny models with random weights, requests to engines that serve them, and the scores of a plain forward pass."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np

from services.common.kept_tokens import unpack
from services.common.records import Sampling, Segment
from services.inference.engine.base import Generation, GenerationRequest

VOCAB = 301
TOLERANCE = 1e-4  # float32 noise of a forward pass is 3e-6
_ids = itertools.count()


def make_request(
    prompt: list[int],
    *,
    stop: tuple[int, ...] = (),
    seed: int | None = 0,
    forced: list[int] | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"request-{next(_ids)}",
        prompt_ids=tuple(prompt),
        sampling=Sampling(**sampling),
        stop_token_ids=stop,
        seed=seed,
        forced_ids=None if forced is None else tuple(forced),
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 + 13 * seed + 31 * i + i * i * (seed + 1)) % VOCAB for i in range(length)]


def build_model(kind: str, *, tied: bool = True, seed: int = 0, head_dim: int = 24, num_layers: int = 2) -> Any:
    """A random model; weights large enough that distributions are far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    config = {
        "qwen3": lambda: Qwen3Config(head_dim=head_dim, **sizes),
        "qwen2": lambda: Qwen2Config(**sizes),
        "llama": lambda: LlamaConfig(**sizes),
    }[kind]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # initialised to constants, which would hide mistakes
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def perturbed(model: Any, seed: int = 1, scale: float = 0.05) -> Any:
    """A copy with other weights: the next version."""
    import torch

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def reference_logprobs(model: Any, token_ids: list[int], first: int, *, temperature: float = 1.0) -> Any:
    """Log-probabilities of ``token_ids[first:]`` by a plain transformers forward pass, [len - first, vocabulary]."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, first - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def kept_sets(generation: Generation) -> list[set[int]]:
    """The ids that could be drawn for each token, as reported by the engine."""
    found = []
    for segment in generation.segments:
        sets = unpack(segment.kept, segment.token_ids)
        for token in range(sets.num_tokens):
            ids = set(sets.ids[sets.rows == token].tolist())
            found.append(set(range(VOCAB)) - ids if sets.left_out[token] else ids)
    return found


def max_gap(model: Any, prompt: list[int], generation: Generation, segment: Segment, temperature: float = 1.0) -> float:
    """Largest distance of one segment's log-probabilities from a forward pass of ``model`` over everything before."""
    ids = prompt + generation.token_ids
    reference = reference_logprobs(model, ids, len(prompt), temperature=temperature).numpy()
    chosen = reference[np.arange(len(generation.token_ids)), generation.token_ids]
    start = 0
    for other in generation.segments:
        if other is segment:
            return float(np.abs(chosen[start : start + segment.num_tokens] - segment.logprobs).max())
        start += other.num_tokens
    raise AssertionError("not a segment of this generation")
