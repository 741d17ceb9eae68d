"""Operations of a step equal torch's own count; unknown values are not reported."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.trainer.metrics import Usage
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

LENGTH = 12


def qwen2() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=40, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=50, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)  # no head_dim of its own, biases on queries, keys and values


@pytest.mark.parametrize("make", [tiny_causal_lm, lambda: tiny_causal_lm(tied=False), qwen2])
def test_the_formula_counts_as_many_operations_as_torch(make) -> None:  # type: ignore[no-untyped-def]
    """Eager attention multiplies all pairs, and every token passes the head: so the test compares with these numbers."""
    plain = make()
    plain.set_attn_implementation("eager")
    ids = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        logits = plain(input_ids=ids).logits
    forward = counter.get_total_flops()
    cost = Usage(PolicyModel(make()), Ranks.single(), None)
    assert cost.flops(LENGTH, LENGTH, LENGTH * LENGTH) == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * forward, "backwards is twice forwards"


def test_a_step_tells_its_operations_memory_and_share_of_the_peak() -> None:
    sequences = training_sequences(8)
    step = train_step(algorithm(name="ppo_clip"), max_tokens=30)
    metrics = step.run(rank_batch(sequences))
    cost = Usage(step.model, step.ranks, None)
    assert metrics.tflops is not None
    lengths = [s.sequence.num_tokens - 1 for s in sequences]  # the last token predicts nothing
    assert metrics.num_computed_tokens == sum(lengths) == metrics.num_tokens - len(sequences)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    needed = 3 * cost.flops(sum(lengths), metrics.num_trained_tokens, pairs)
    assert metrics.tflops * 1e12 * metrics.seconds == pytest.approx(needed)
    assert metrics.memory_peak_gib > 0.05
    assert metrics.mfu is None and "mfu" not in metrics.as_dict(), "nobody knows what this CPU can do"

    known = train_step(algorithm(name="ppo_clip"), peak_flops=1e12).run(rank_batch(sequences))
    assert known.mfu == pytest.approx(known.tflops) and known.as_dict()["mfu"] == known.mfu
