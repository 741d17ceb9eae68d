"""Golden vectors and properties of the policy losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.losses import (
    ALGORITHMS,
    TokenBatch,
    binding_second_moments,
    kl_per_token,
    largest_kept,
    m2po,
    trust_region,
)
from tests.unit.trainer.building import algorithm

BEHAVIOUR_ZERO = 0.0


def tokens(
    logprobs: list[float],
    advantages: list[float],
    *,
    behaviour: list[float] | None = None,
    proximal: list[float] | None = None,
    mask: list[bool] | None = None,
    sequence_index: list[int] | None = None,
) -> TokenBatch:
    n = len(logprobs)
    index = sequence_index or [0] * n
    return TokenBatch(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        behaviour=torch.tensor(behaviour or [BEHAVIOUR_ZERO] * n, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.tensor(mask or [True] * n),
        sequence_index=torch.tensor(index),
        num_sequences=max(index) + 1,
        proximal=None if proximal is None else torch.tensor(proximal, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("d", "advantages", "threshold", "eps_low", "eps_high", "mean"),
    [
        ([0.0, 0.0, 0.0], [1, 1, -1], 0.01, 0.95, 20.0, 0.0),
        ([0.05, -0.02, 0.3], [1, 1, 1], 0.01, 0.0487705, 0.0512711, 0.04625),
        ([0.05, 0.02, 0.3, 0.08], [1, 1, 1, 1], 0.01, 0.0768837, 0.0832871, 0.024825),
        ([0.5], [1], 0.01, 0.3934693, 0.6487212, 0.25),
        ([4.0, 4.1], [1, 1], 0.01, 0.95, 20.0, 16.405),
        ([0.2, 0.02, 0.02, 0.02], [1, 1, 1, 1], 0.004, 0.0198013, 0.0202013, 0.0103),
    ],
)
def test_m2po_trust_region_golden(
    d: list[float], advantages: list[float], threshold: float, eps_low: float, eps_high: float, mean: float
) -> None:
    moments = binding_second_moments(
        torch.tensor(d, dtype=torch.float64), torch.tensor(advantages), torch.ones(len(d), dtype=torch.bool)
    )
    region = trust_region(moments, algorithm("m2po", m2po_threshold=threshold))
    assert region.eps_low.item() == pytest.approx(eps_low, rel=1e-5)
    assert region.eps_high.item() == pytest.approx(eps_high, rel=1e-5)
    assert region.mean_second_moment.item() == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_m2po_drops_exactly_the_tokens_beyond_the_largest_kept(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([0.05, 0.02, 0.3, 0.08, -0.7], dtype=dtype, requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour=torch.zeros(5, dtype=dtype),
        advantages=torch.ones(5, dtype=dtype),
        mask=torch.ones(5, dtype=torch.bool),
        sequence_index=torch.zeros(5, dtype=torch.int64),
        num_sequences=1,
    )
    loss = m2po(batch, algorithm(name="m2po"))
    loss.per_token.sum().backward()
    assert logprobs.grad is not None
    # 0.08 defines the region and keeps its gradient; 0.3 is dropped; -0.7 moves back towards behaviour and stays.
    assert (logprobs.grad != 0).tolist() == [True, True, False, True, True]
    assert loss.counts["clipped_tokens"].item() == 1


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=40), st.floats(0.001, 1.0))
def test_m2po_suffix_rule_equals_dropping_one_by_one(moments: list[float], threshold: float) -> None:
    kept = sorted(moments)
    if sum(kept) / len(kept) > threshold * (1 + 1e-9):
        while len(kept) > 1 and sum(kept) / len(kept) >= threshold:
            kept.pop()
        c = math.sqrt(kept[-1])
        low, high = min(1 - math.exp(-c), 0.95), min(math.exp(c) - 1, 20.0)
        config = algorithm("m2po", m2po_threshold=threshold)
        region = trust_region(torch.tensor(moments, dtype=torch.float64), config)
        assert region.eps_low.item() == pytest.approx(low, rel=1e-6, abs=1e-12)
        assert region.eps_high.item() == pytest.approx(high, rel=1e-6, abs=1e-12)


def test_m2po_mask_ignores_signs_and_keeps_at_least_one() -> None:
    gaps = torch.tensor([0.3, -0.3, 0.01, 0.02]).square()
    assert (gaps <= largest_kept(gaps, 0.01)).tolist() == [False, False, True, True]
    one = torch.tensor([0.9]).square()
    assert (one <= largest_kept(one, 0.01)).tolist() == [True]


def test_dual_clip_golden() -> None:
    batch = tokens([0.5, -0.5, 1.5, -1.5], [1, 1, -1, -1])
    config = algorithm(name="ppo_clip", eps_clip=0.2, eps_clip_higher=0.28, c_clip=3.0)
    result = ALGORITHMS["ppo_clip"].loss(batch, config)
    assert result.per_token.tolist() == pytest.approx([-1.28, -0.60653, 3.0, 0.8], rel=1e-5)
    assert result.per_token.mean().item() == pytest.approx(0.4784, abs=5e-5)
    assert result.counts["dual_clipped_tokens"].item() == 1


def test_gspo_has_one_ratio_per_sequence() -> None:
    batch = tokens([0.1, 0.3, -0.4, 9.0], [1, 1, -1, -1], mask=[True, True, True, False], sequence_index=[0, 0, 1, 1])
    loss = ALGORITHMS["gspo"].loss(batch, algorithm(name="gspo", eps_clip=0.3, eps_clip_higher=0.3)).per_token
    assert loss.tolist() == pytest.approx([-math.exp(0.2), -math.exp(0.2), 0.7, 0.0])


def test_cispo_and_reinforce_have_the_score_function_gradient() -> None:
    batch = tokens([0.5, 3.0], [2, -1])
    ALGORITHMS["cispo"].loss(batch, algorithm(name="cispo", importance_cap=2.0)).per_token.sum().backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx([-2 * math.exp(0.5), 2.0])
    batch = tokens([0.5, 3.0], [2, -1])
    ALGORITHMS["reinforce"].loss(batch, algorithm(name="reinforce")).per_token.sum().backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_no_loss_overflows_or_leaks_masked_tokens(name: str) -> None:
    batch = tokens([800.0, -800.0, 5e5, 0.0], [1, -1, -1, 1], proximal=[0.0] * 4, mask=[True, True, False, True])
    loss = ALGORITHMS[name].loss(batch, algorithm(name=name)).per_token  # type: ignore[arg-type]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert loss[2].item() == 0.0
    assert batch.logprobs.grad is not None
    assert torch.isfinite(batch.logprobs.grad).all()
    assert batch.logprobs.grad[2].item() == 0.0


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_loss_takes_no_tokens(name: str) -> None:
    batch = TokenBatch(
        logprobs=torch.zeros(0, requires_grad=True),
        behaviour=torch.zeros(0),
        advantages=torch.zeros(0),
        mask=torch.zeros(0, dtype=torch.bool),
        sequence_index=torch.zeros(0, dtype=torch.int64),
        num_sequences=1,
        proximal=torch.zeros(0),
    )
    loss = ALGORITHMS[name].loss(batch, algorithm(name=name)).per_token  # type: ignore[arg-type]
    assert loss.shape == (0,)
    assert loss.requires_grad


def test_kl_estimators() -> None:
    logprobs, reference = torch.tensor([0.0, -1.0]), torch.tensor([-0.5, -0.25])
    assert kl_per_token(logprobs, reference, "k1").tolist() == pytest.approx([0.5, -0.75])
    assert kl_per_token(logprobs, reference, "k2").tolist() == pytest.approx([0.125, 0.28125])
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(0.75) - 1 - 0.75]
    assert kl_per_token(logprobs, reference, "k3").tolist() == pytest.approx(expected, rel=1e-5)
