"""Tiny models and batches for the trainer's tests: random weights, seeded data, real records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.common.config.algorithm import DEFAULT_LOSS, AlgorithmConfig, LossConfig
from services.common.config.training import OptimizerConfig
from services.common.kept_tokens import kept_rows, pack
from services.common.lora import identity_of
from services.common.records import MinibatchTotals, RankBatch, Segment, StopReason, TokenSequence, TrainingSequence
from services.trainer.model.attention import Branch
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import AdapterSetup, WithoutAdapter, build_policy_model, digest_base, own_rates
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep

VOCAB = 31

_LOSSES: TypeAdapter[AlgorithmConfig] = TypeAdapter(LossConfig)


def algorithm(name: str = DEFAULT_LOSS, **settings: Any) -> Any:
    """The section `algorithm` of a recipe, in the settings class of its name."""
    return _LOSSES.validate_python({"name": name, **settings})


def tiny_causal_lm(dtype: torch.dtype = torch.float32, *, tied: bool = True, seed: int = 0) -> Any:
    """A Qwen3 of two layers with grouped key-value heads, and weights large enough for distributions far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).to(dtype)


def tiny_experts(**settings: Any) -> Any:
    """A mixture of four experts, which a checkpoint stores one by one and transformers computes with as one tensor."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        **settings,
    })  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def truncated(segment: Segment, rng: np.random.Generator) -> Segment:
    """A policy segment of tokens drawn from some of the vocabulary, now and then at a temperature of their own."""
    num_tokens = segment.num_tokens
    order = np.argsort(rng.random((num_tokens, VOCAB)), axis=1)
    rows = kept_rows(order, rng.integers(0, VOCAB, num_tokens), segment.token_ids.astype(np.int64), VOCAB)
    packed = pack(rows[: int(rng.integers(num_tokens + 1))], num_tokens)
    return replace(segment, kept=packed, temperature=(None, 0.6, 1.4)[int(rng.integers(3))])


def training_sequences(count: int, *, seed: int = 0, minibatches: int = 1, cut: bool = False) -> list[TrainingSequence]:
    """Two-turn sequences of uneven lengths in groups of four, cut into minibatches in order. ``cut``: truncated sampling."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, size=count).astype(float)
    result = []
    for i in range(count):
        tokens = [rng.integers(0, VOCAB, size=int(n)) for n in rng.integers(1, 9, size=4)]
        segments = tuple(
            Segment.policy(t, rng.normal(-3.0, 0.5, size=len(t)), weight_version=int(rng.integers(3, 5)))
            if turn % 2
            else Segment.environment(t)
            for turn, t in enumerate(tokens)
        )
        if cut:
            segments = tuple(truncated(s, rng) if s.is_policy else s for s in segments)
        group = rewards[4 * (i // 4) : 4 * (i // 4) + 4]
        result.append(
            TrainingSequence(
                sequence_id=f"g{i // 4}/{i % 4}/0",
                sequence=TokenSequence(
                    policy="actor", segments=segments, reward=float(rewards[i]), stop_reason=StopReason.STOP
                ),
                group_mean=float(group.mean()),
                group_std=float(group.std(ddof=1)) if len(group) > 1 else 1.0,
                group_size=len(group),
                staleness=i % 2,
                minibatch=i * minibatches // count,
                position=i,
            )
        )
    return result


def path_of(branches: Iterable[Branch], row: int) -> np.ndarray:
    """The rows that a row of a micro-batch sees, itself the last."""
    branch = next(b for b in branches if b.start <= row < b.end)
    return np.concatenate([branch.prefix, np.arange(branch.start, row + 1)])


def rank_batch(sequences: list[TrainingSequence], rank: int = 0, world_size: int = 1, step: int = 5) -> RankBatch:
    """Every ``world_size``-th sequence, with the totals of all."""
    minibatches = 1 + max(s.minibatch for s in sequences)
    totals = tuple(
        MinibatchTotals(
            num_sequences=sum(s.minibatch == m for s in sequences),
            num_trained_tokens=sum(s.sequence.num_trained_tokens for s in sequences if s.minibatch == m),
        )
        for m in range(minibatches)
    )
    share = tuple(sequences[rank::world_size])
    return RankBatch(policy="actor", training_step=step, minibatches=totals, sequences=share)


def train_step(
    config: AlgorithmConfig,
    *,
    causal_lm: Any = None,
    ranks: Ranks | None = None,
    max_tokens: int = 64,
    optimizer: OptimizerConfig | None = None,
    reference: Any = None,
    teacher: Any = None,
    gradient_checkpointing: bool = False,
    temperature: float = 1.0,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    peak_flops: float | None = None,
    adapter: AdapterSetup | None = None,
) -> TrainStep:
    """A step over a fresh tiny model; ``offload`` is of the optimizer and the reference. With ``adapter`` the base is the
    reference."""
    ranks = ranks or Ranks.single()
    model = build_policy_model(
        causal_lm if causal_lm is not None else tiny_causal_lm(),
        ranks,
        gradient_checkpointing=gradient_checkpointing,
        compute_dtype=compute_dtype,
        value_head=config.value_head is not None,
        adapter=adapter,
    )
    own_reference: Any = None
    if reference is not None:
        own_reference = build_policy_model(reference, ranks, trainable=False, offload=offload)
    if adapter is not None:
        model.base = digest_base(model.causal_lm, ranks, "xxh3-128", "base")
        model.adapter = identity_of(model.causal_lm, adapter.config, model.base.digest)
        own_reference = WithoutAdapter(model)
    return TrainStep(
        model,
        PolicyOptimizer(
            model.named_parameters(),
            optimizer or OptimizerConfig(lr=1e-2),
            offload=offload,
            rates=own_rates(config.value_head),
        ),
        config,
        ranks,
        max_tokens_per_micro_batch=max_tokens,
        temperature=temperature,
        reference=own_reference,
        teacher=None if teacher is None else build_policy_model(teacher, ranks, trainable=False, offload=offload),
        peak_flops=peak_flops,
    )
