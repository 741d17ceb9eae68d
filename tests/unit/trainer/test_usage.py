"""Operations of a step equal torch's own count; unknown values are not reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.trainer.metrics import PEAK_TFLOPS, ForwardCost, peak_flops
from services.trainer.model.attention import Documents
from services.trainer.model.policy_model import PolicyModel
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
    cost = ForwardCost.of(PolicyModel(make()))
    assert cost is not None
    assert cost.flops(LENGTH, LENGTH, LENGTH * LENGTH) == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * forward, "backwards is twice forwards"


def test_a_step_tells_its_operations_memory_and_share_of_the_peak() -> None:
    sequences = training_sequences(8)
    step = train_step(algorithm(name="ppo_clip"), max_tokens=30)
    metrics = step.run(rank_batch(sequences))
    cost = ForwardCost.of(step.model)
    assert cost is not None and metrics.tflops is not None
    lengths = [s.sequence.num_tokens - 1 for s in sequences]  # the last token predicts nothing
    assert metrics.num_computed_tokens == sum(lengths) == metrics.num_tokens - len(sequences)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    needed = 3 * cost.flops(sum(lengths), metrics.num_trained_tokens, pairs)
    assert metrics.tflops * 1e12 * metrics.seconds == pytest.approx(needed)
    assert metrics.memory_peak_gib > 0.05
    assert metrics.mfu is None and "mfu" not in metrics.as_dict(), "nobody knows what this CPU can do"

    known = train_step(algorithm(name="ppo_clip"), peak_flops=1e12).run(rank_batch(sequences))
    assert known.mfu == pytest.approx(known.tflops) and known.as_dict()["mfu"] == known.mfu


def test_documents_count_the_pairs_of_causal_attention() -> None:
    lengths = [3, 3, 1, 5]
    documents = Documents.from_offsets(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    assert documents.num_pairs == sum(n * (n + 1) // 2 for n in lengths)


def test_tokens_that_sequences_share_count_once_and_the_metrics_tell_both_numbers() -> None:
    once, alike = training_sequences(4), []
    for item in once:
        alike += [item] * 3
    single, several = (train_step(algorithm(name="ppo_clip")).run(rank_batch(s)) for s in (once, alike))
    assert several.num_tokens == 3 * single.num_tokens and several.num_trained_tokens == 3 * single.num_trained_tokens
    assert several.num_computed_tokens == single.num_computed_tokens
    assert single.tflops is not None and several.tflops is not None
    assert several.tflops * several.seconds == pytest.approx(single.tflops * single.seconds)


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("Tesla T4", None, None),
    ],
)
def test_peaks_go_by_the_name_of_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, bfloat16: float | None, float32: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda", 0)
    assert (peak_flops(gpu, torch.bfloat16, None), peak_flops(gpu, torch.float32, None)) == (bfloat16, float32)
    assert peak_flops(gpu, torch.bfloat16, 500.0) == 500e12
    assert peak_flops(torch.device("cpu"), torch.float32, None) is None


def test_no_name_hides_a_longer_one() -> None:
    names = [name for name, *_ in PEAK_TFLOPS]
    for index, name in enumerate(names):
        assert not any(name.startswith(earlier) for earlier in names[:index]), name
