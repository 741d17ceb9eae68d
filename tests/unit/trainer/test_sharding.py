from __future__ import annotations

import torch
import torch.distributed as dist

from services.common.text.chat import named_weights
from services.trainer.model.policy_model import build_policy_model
from services.trainer.ranks import Ranks, init_ranks, whole_tensors
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences


def test_full_weights_have_the_names_that_engines_use_and_tied_ones_once() -> None:
    model = build_policy_model(tiny_causal_lm(tied=True), Ranks.single())
    weights = dict(whole_tensors(named_weights(model.causal_lm), Ranks.single(), torch.bfloat16))
    assert list(weights) == list(named_weights(tiny_causal_lm(tied=True)))
    assert "lm_head.weight" not in weights
    assert all(w is not None and w.dtype == torch.bfloat16 for w in weights.values())


def test_full_weights_are_copies() -> None:
    model = build_policy_model(tiny_causal_lm(), Ranks.single())
    for weight in dict(whole_tensors(named_weights(model.causal_lm), Ranks.single(), torch.float32)).values():
        assert weight is not None
        weight.zero_()
    assert all(p.any() for p in model.parameters())


def test_bfloat16_compute_keeps_float32_master_weights() -> None:
    ranks = init_ranks(timeout_s=30.0, device="cpu", always_group=True)
    try:
        model = build_policy_model(tiny_causal_lm(), ranks, compute_dtype=torch.bfloat16)
        step = train_step(algorithm(name="ppo_clip"))
        exact = step.run(rank_batch(training_sequences(8)))
        sharded = type(step)(model, type(step.optimizer)(model.named_parameters(), step.optimizer.config),
                             step.config, ranks, max_tokens_per_micro_batch=64)  # fmt: skip
        metrics = sharded.run(rank_batch(training_sequences(8)))
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert abs(metrics.loss - exact.loss) < 0.05
        assert abs(metrics.grad_norm / exact.grad_norm - 1) < 0.1
    finally:
        dist.destroy_process_group()
