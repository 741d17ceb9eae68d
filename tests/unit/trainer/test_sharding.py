from __future__ import annotations

import torch
import torch.distributed as dist

from services.common.text.chat import named_weights
from services.trainer.model.policy_model import build_policy_model, load_policy_model
from services.trainer.ranks import Ranks, full_weights, init_ranks
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences


def test_full_weights_have_the_names_that_engines_use_and_tied_ones_once() -> None:
    model = build_policy_model(tiny_causal_lm(tied=True), Ranks.single())
    weights = dict(full_weights(model.causal_lm, Ranks.single(), torch.bfloat16))
    assert list(weights) == list(named_weights(tiny_causal_lm(tied=True)))
    assert "lm_head.weight" not in weights
    assert all(w is not None and w.dtype == torch.bfloat16 for w in weights.values())


def test_full_weights_are_copies() -> None:
    model = build_policy_model(tiny_causal_lm(), Ranks.single())
    for weight in dict(full_weights(model.causal_lm, Ranks.single(), torch.float32)).values():
        assert weight is not None
        weight.zero_()
    assert all(p.any() for p in model.parameters())


def test_ranks_other_than_the_first_get_no_tensor() -> None:
    model = build_policy_model(tiny_causal_lm(), Ranks.single())
    other = Ranks(rank=1, world_size=1, device=torch.device("cpu"))
    assert all(weight is None for _, weight in full_weights(model.causal_lm, other, torch.float32))


def test_a_model_loads_from_a_directory(tmp_path) -> None:  # type: ignore[no-untyped-def]
    original = tiny_causal_lm()
    original.save_pretrained(tmp_path)
    model = load_policy_model(tmp_path, Ranks.single())
    for name, weight in named_weights(model.causal_lm).items():
        assert torch.equal(weight, named_weights(original)[name])


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
