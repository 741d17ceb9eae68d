"""The zero-gradient audit counts the zero gradients of autograd, names one cause per token, and changes no gradient."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.training import OptimizerConfig
from services.common.records import MinibatchTotals, Segment
from services.trainer.losses import ALGORITHMS, LossFunction, TokenBatch
from services.trainer.metrics import Sums, add_ratios, add_zero_gradients, shares
from services.trainer.model.micro_batches import Document, MicroBatch, pack_for_ranks
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

CLAMP = 20.0


def micro_batch(advantages: list[float], behaviour: list[float]) -> MicroBatch:
    """One sequence of these tokens behind a prompt of one token."""
    sequence = training_sequences(1)[0]
    tokens = Segment.policy([1] * len(behaviour), behaviour, weight_version=4)
    segments = (Segment.environment([1]), tokens)
    item = dataclasses.replace(sequence, sequence=dataclasses.replace(sequence.sequence, segments=segments))
    (packed,) = pack_for_ranks([[Document.from_training_sequence(item, 0.0)]], 100, Ranks.single(), torch.float64)
    return dataclasses.replace(packed[0], advantages=torch.tensor(advantages, dtype=torch.float64))


def tokens_of(logprobs: torch.Tensor, batch: MicroBatch, mask: list[bool] | None = None) -> TokenBatch:
    """As the step gives them to a loss, at the proximal policy."""
    return TokenBatch(
        logprobs=logprobs,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        mask=torch.tensor(mask if mask is not None else [True] * len(logprobs)),
        sequence_index=batch.sequence_index,
        num_sequences=1,
        proximal=logprobs.detach(),
    )


def counted(
    loss: LossFunction,
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    config: AlgorithmConfig | None = None,
) -> dict[str, float]:
    """Numbers of tokens by the audit's names."""
    batch = micro_batch(advantages, behaviour)
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    sums = Sums(torch.device("cpu"))
    seen = current.view_as(current)
    seen.retain_grad()
    tokens = tokens_of(seen, batch, mask)
    result = loss(tokens, config)
    if result.per_token.requires_grad:
        result.per_token.sum().backward()
    add_zero_gradients(sums, tokens, result)
    return {name: count for name, count in sums.reduce(Ranks.single()).items() if count}


def test_each_token_without_gradient_has_its_one_cause() -> None:
    """PPO with the behaviour at -1 throughout: ratio 2 or 1/2 leaves the clip of 0.2, 25 nats leave the clamp of 20."""
    up, down, same, far = -1 + math.log(2), -1 - math.log(2), -1.0, 24.0
    found = counted(
        ALGORITHMS["ppo_clip"].loss,
        logprobs=[up, up, down, down, same, up, far, far, up],
        behaviour=[-1.0] * 9,
        advantages=[1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 1.0, -1.0, 1.0],
        mask=[True] * 8 + [False],
        config=algorithm("ppo_clip"),
    )
    assert found == {
        "zero_gradient/positive/clipped_tokens": 1,  # the first
        "zero_gradient/negative/clipped_tokens": 1,  # the fourth
        "zero_gradient/zero_advantage_tokens": 1,
        "zero_gradient/positive/clamped_tokens": 1,
        "zero_gradient/negative/clamped_tokens": 1,
        "zero_gradient/positive/masked_tokens": 1,
        "zero_gradient_tokens": 6,
        "advantage_positive_tokens": 5,
        "advantage_negative_tokens": 3,
    }


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_causes_of_every_loss_sum_to_the_zeros_of_autograd(name: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    numbers = st.lists(st.sampled_from([-30.0, -3.0, -1.0, -0.9, -0.5]), min_size=count, max_size=count)
    signs = st.lists(st.sampled_from([-1.5, 0.0, 1.0]), min_size=count, max_size=count)
    logprobs, behaviour, advantages = data.draw(numbers), data.draw(numbers), data.draw(signs)
    loss, config = ALGORITHMS[name].loss, algorithm(name)
    found = counted(loss, logprobs, behaviour, advantages, config=config)
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(current, micro_batch(advantages, behaviour))
    (gradient,) = torch.autograd.grad(loss(tokens, config).per_token.sum(), current)
    assert found.get("zero_gradient_tokens", 0) == int((gradient == 0).sum())
    causes = sum(v for k, v in found.items() if k.startswith("zero_gradient/"))
    assert causes == found.get("zero_gradient_tokens", 0)


def by_packing(config: AlgorithmConfig, reference: bool = False) -> list[dict[str, float]]:
    batch = rank_batch(training_sequences(12, minibatches=3))
    slow = OptimizerConfig(lr=1e-9)
    found = []
    for budget in (24, 4096):
        other = tiny_causal_lm(seed=3) if reference else None
        metrics = train_step(config, max_tokens=budget, optimizer=slow, reference=other).run(batch)
        found.append({k: v for k, v in metrics.algorithm.items() if "gradient" in k or "effective" in k})
    return found


@pytest.mark.parametrize("name", ["ppo_clip", "m2po", "m2po_mask", "decoupled_ppo", "gspo"])
def test_the_audit_of_a_step_does_not_depend_on_packing(name: str) -> None:
    small, large = by_packing(algorithm(name))
    assert small == pytest.approx(large)
    whole = sum(share for name, share in small.items() if name.startswith("zero_gradient/"))
    assert whole == pytest.approx(small["zero_gradient_share"])
    assert 0 < small["zero_gradient_share"] < 1


def test_a_kl_term_hides_no_token_that_the_policy_loss_leaves_without_gradient() -> None:
    plain, _ = by_packing(algorithm("ppo_clip"))
    with_kl, _ = by_packing(algorithm("ppo_clip", kl_coefficient=0.1), reference=True)
    assert with_kl == pytest.approx(plain)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_effective_sample_size_is_taken_over_whole_minibatches(gaps: list[list[float]]) -> None:
    """Each micro-batch of a minibatch adds to the same two sums."""
    sums = Sums(torch.device("cpu"))
    for gap in gaps:
        batch = micro_batch([1.0] * len(gap), [-3.0] * len(gap))
        add_ratios(sums, 0, batch, torch.tensor(gap, dtype=torch.float64) + batch.behaviour)
    flat = [value for gap in gaps for value in gap]
    found = shares(sums.reduce(Ranks.single()), (MinibatchTotals(num_sequences=1, num_trained_tokens=len(flat)),))
    weights = [math.exp(value) for value in flat]
    expected = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert found["effective_sample_share"] == pytest.approx(expected, rel=1e-4)  # behaviour is float32 on its way
    assert found["effective_sample_share_min"] == found["effective_sample_share"] <= 1.0 + 1e-9
