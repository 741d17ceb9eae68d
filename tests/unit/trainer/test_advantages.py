from __future__ import annotations

import dataclasses
import math
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from services.common.config.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError
from services.common.records import Segment, StopReason, TokenSequence, TrainingSequence
from services.trainer.advantages import (
    Moments,
    at_last_token,
    discounted_sums,
    distillation_advantages,
    gae,
    max_rl_advantages,
    normalize,
    over_batch_deviation,
    pass_at_k_advantages,
    reward_moments,
    scaled_by_source,
    sequence_advantages,
)
from services.trainer.losses import value_loss
from tests.unit.trainer.building import VOCAB, algorithm, rank_batch, train_step, training_sequences


def group(rewards: list[float]) -> list[TrainingSequence]:
    std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 1.0
    return [
        TrainingSequence(
            sequence_id=f"g/{i}/0",
            sequence=TokenSequence(
                policy="actor",
                segments=(Segment.environment([1]), Segment.policy([2], [-1.0], 0)),
                reward=reward,
                stop_reason=StopReason.STOP,
            ),
            group_mean=float(np.mean(rewards)),
            group_std=std,
            group_size=len(rewards),
            staleness=0,
            minibatch=0,
            position=i,
        )
        for i, reward in enumerate(rewards)
    ]


def test_grpo_golden() -> None:
    sequences = group([1, 0, 0, 1]) + group([1, 1, 1, 1])
    expected = [0.86601, -0.86601, -0.86601, 0.86601, 0, 0, 0, 0]
    assert sequence_advantages(sequences, AlgorithmConfig()).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("eps", [1e-5, 1e-300])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0] * 8, [0.0] * 4, [1 / 3] * 7, [-49.9] * 5, [1e9 + 0.1] * 3])
def test_equal_rewards_have_no_advantage_whatever_their_rounding(rewards: list[float], eps: float) -> None:
    """Review, defect 14: with an epsilon of 0 equal rewards gave NaN, and .1, .1, .1 gave -.82 each."""
    for name in ("grpo", "dr_grpo", "rloo"):
        config = AlgorithmConfig(advantage=name, advantage_eps=eps)  # type: ignore[arg-type]
        assert sequence_advantages(group(rewards), config).tolist() == [0.0] * len(rewards)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.25, 0.0, 0.5]
    others = [(sum(rewards) - r) / 3 for r in rewards]
    found = sequence_advantages(group(rewards), AlgorithmConfig(advantage="rloo"))
    assert found.tolist() == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


@pytest.mark.parametrize(("kind", "ddof"), [("population", 0), ("sample", 1)])
def test_batch_normalisation_is_over_trained_tokens_and_adds_up_over_ranks(kind: Any, ddof: int) -> None:
    config = AlgorithmConfig(batch_normalize_advantages=True, normalize_deviation=kind)
    advantages, tokens = np.array([1.0, -2.0, 0.5, 3.0]), np.array([3.0, 1.0, 0.0, 6.0])
    ranks = [Moments.of(advantages[:1], tokens[:1]), Moments.of(advantages[1:], tokens[1:])]
    moments = Moments(*(sum(m) for m in zip(*map(dataclasses.astuple, ranks), strict=True)))
    per_token = np.repeat(advantages, tokens.astype(int))
    expected = (advantages - per_token.mean()) / (per_token.std(ddof=ddof) + 1e-5)
    assert normalize(advantages, moments, config).tolist() == pytest.approx(expected.tolist())


def test_with_batch_deviation_a_reward_is_centred_in_its_group_and_scaled_by_the_batch() -> None:
    config = AlgorithmConfig(deviation="batch")
    sequences = group([1.0, 0.0, 0.0, 0.0]) + group([3.0, 2.5, 3.5])
    rewards = np.array([s.sequence.reward for s in sequences])
    means = np.repeat([rewards[:4].mean(), rewards[4:].mean()], [4, 3])
    found = over_batch_deviation(sequence_advantages(sequences, config), reward_moments(sequences), config)
    assert found.tolist() == pytest.approx(((rewards - means) / (rewards.std(ddof=1) + 1e-5)).tolist())


def test_the_scale_of_a_source_multiplies_the_advantages_of_its_sequences() -> None:
    plain = group([1.0, 0.0])
    scaled = [dataclasses.replace(item, advantage_scale=0.25) for item in group([1.0, 0.0])]
    advantages = sequence_advantages([*plain, *scaled], AlgorithmConfig())
    found = scaled_by_source(advantages, [*plain, *scaled]).tolist()
    assert found[:2] == advantages[:2].tolist(), "the bits of a run with one dataset stay"
    assert found[2:] == [0.25 * value for value in advantages[2:].tolist()]


# -- Pass@k and MaxRL against definitions that share no code with them.


REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9)


def statistics(rewards: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.array(rewards)
    return values, np.full(len(values), values.mean()), np.full(len(values), float(len(values)))


def by_enumeration(rewards: list[float], k: int, eps: float) -> list[float]:
    """Reference: scores every subset of k by its best; a rollout's advantage is the mean over its subsets."""
    subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    scores = np.array([max(rewards[i] for i in subset) for subset in subsets])
    found = []
    for i in range(len(rewards)):
        own = np.array([score for score, subset in zip(scores, subsets, strict=True) if i in subset])
        found.append((own.mean() - scores.mean()) / (scores.std() + eps))
    return found


@given(rewards=REWARDS, k=st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int) -> None:
    found = pass_at_k_advantages(*statistics(rewards), k, 1e-5)
    assert found.tolist() == pytest.approx(by_enumeration(rewards, k, 1e-5), abs=1e-9)


def test_pass_at_k_refuses_rewards_without_right_and_wrong() -> None:
    with pytest.raises(InvalidRequestError, match=r"rewards of 0 or 1.*a reward of 0\.5"):
        pass_at_k_advantages(*statistics([0.5, 1.0]), 2, 1e-5)
    with pytest.raises(InvalidRequestError, match="rewards of 0 or 1"):  # a sibling's, which shows in the mean
        pass_at_k_advantages(np.array([1.0]), np.array([0.75]), np.array([2.0]), 2, 1e-5)


@given(rewards=REWARDS)
def test_max_rl_is_the_mean_over_the_right_ones_minus_the_mean_over_all(rewards: list[float]) -> None:
    """The estimator of arXiv 2602.02710: sum over right of S / K minus sum of S / N, for any scores S."""
    scores = np.random.default_rng(31).normal(size=len(rewards))
    found = max_rl_advantages(*statistics(rewards)[:2])
    right = scores[np.array(rewards) == 1.0]
    expected = right.mean() - scores.mean() if len(right) else 0.0
    assert (found * scores).mean() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_max_rl_refuses_rewards_that_are_no_share_of_right_ones(reward: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"from 0 to 1, got {reward}"):
        max_rl_advantages(*statistics([reward, 1.0])[:2])


# -- Advantages and moments of the largest rewards that the orchestrator takes, and batches of untrainable sequences.


MOST = 1e12  # a reward of 1e6 times a scale of 1e6
ANY_REWARDS = st.lists(st.floats(-MOST, MOST), min_size=2, max_size=8)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce"])
@given(rewards=ANY_REWARDS)
@example(rewards=[MOST, -MOST])
@example(rewards=[MOST, -MOST, -MOST])
@example(rewards=[1e-300, 0.0])
def test_advantages_are_finite_for_all_rewards(advantage: Any, rewards: list[float]) -> None:
    mean, deviation = fmean(rewards), stdev(rewards)
    sequences = [
        dataclasses.replace(
            item,
            sequence=dataclasses.replace(item.sequence, reward=reward),
            group_mean=mean,
            group_std=deviation,
            group_size=len(rewards),
        )
        for item, reward in zip(training_sequences(len(rewards)), rewards, strict=True)
    ]
    config = AlgorithmConfig(advantage=advantage)
    advantages = sequence_advantages(sequences, config)
    assert np.isfinite(advantages).all()
    moments = reward_moments(sequences)
    assert math.isfinite(moments.mean) and math.isfinite(moments.deviation("sample"))
    assert np.isfinite(over_batch_deviation(advantages, moments, config)).all()
    own = Moments.of(advantages, np.ones_like(advantages))
    assert np.isfinite(normalize(advantages, own, config)).all()


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (Segment.policy([1, 2**31 - 1], [-1.0, -1.0], 0), f"the token id {2**31 - 1}"),
        (Segment.policy([1, VOCAB], [-1.0, -1.0], 0), f"the token id {VOCAB}"),
    ],
)
def test_unknown_token_ids_are_named_before_the_forward_pass(said: Segment, fault: str) -> None:
    sequences = training_sequences(4)
    sequence = dataclasses.replace(sequences[2].sequence, segments=(Segment.environment([3]), said))
    sequences[2] = dataclasses.replace(sequences[2], sequence=sequence)
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        train_step(algorithm()).run(rank_batch(sequences))
    assert caught.value.metadata["sequence_id"] == sequences[2].sequence_id


# -- Discounted sums and GAE equal a plain loop in float64, and do not depend on packing.


def plain_gae(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one sequence, from the last token backwards, by the paper's formula."""
    advantages = [0.0] * len(rewards)
    later = 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * later
        advantages[t] = later
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def flat(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards, values, sequence_index)"""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    index = np.repeat(np.arange(len(lengths)), lengths)
    return torch.tensor(rng.normal(size=total)), torch.tensor(rng.normal(size=total)), torch.tensor(index)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.5, 1.0)])
@given(lengths=st.lists(st.integers(1, 40), max_size=6), seed=st.integers(0, 2**31))
def test_gae_is_the_recursion_of_the_paper(gamma: float, gae_lambda: float, lengths: list[int], seed: int) -> None:
    rewards, values, index = flat(lengths, seed)
    advantages, returns = gae(rewards, values, index, gamma, gae_lambda)
    expected: tuple[list[float], list[float]] = ([], [])
    for number in range(len(lengths)):
        own = index == number
        for found, more in zip(
            expected, plain_gae(rewards[own].tolist(), values[own].tolist(), gamma, gae_lambda), strict=True
        ):
            found += more
    assert advantages.tolist() == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    assert returns.tolist() == pytest.approx(expected[1], rel=1e-12, abs=1e-12)


@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5), seed=st.integers(0, 2**31))
def test_a_sequence_has_the_same_bits_alone_as_among_others(lengths: list[int], seed: int) -> None:
    rewards, values, index = flat(lengths, seed)
    whole, _ = gae(rewards, values, index, 0.97, 0.9)
    for number in range(len(lengths)):
        own = index == number
        alone, _ = gae(rewards[own], values[own], torch.zeros(int(own.sum()), dtype=torch.int64), 0.97, 0.9)
        assert torch.equal(whole[own], alone)


def test_an_outcome_without_values_is_discounted_by_the_tokens_that_are_left() -> None:
    """REINFORCE++ with gamma below 1: G_t = gamma^(last - t) R."""
    index = torch.tensor([0, 0, 0, 1])
    rewards = at_last_token(torch.tensor([2.0, 2.0, 2.0, -1.0]), index)
    assert rewards.tolist() == [0.0, 0.0, 2.0, -1.0]
    assert discounted_sums(rewards, index, 0.5).tolist() == [0.5, 1.0, 2.0, -1.0]


def test_a_token_is_paid_by_how_much_likelier_the_teacher_finds_it() -> None:
    rng = np.random.default_rng(41)
    task, student, teacher = rng.normal(-2.0, 1.0, size=(3, 20))
    found = distillation_advantages(
        torch.tensor(task), torch.tensor(student, requires_grad=True), torch.tensor(teacher),
        coefficient=0.7, task_coefficient=0.25,
    )  # fmt: skip
    assert found.tolist() == pytest.approx((0.25 * task + 0.7 * (teacher - student)).tolist())
    assert not found.requires_grad


def test_one_token_cannot_take_a_whole_update() -> None:
    found = distillation_advantages(
        torch.zeros(2), torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0]),
        coefficient=1.0, task_coefficient=1.0,
    )  # fmt: skip
    assert found.tolist() == [-20.0, 20.0]


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Summed over all tokens with their probabilities: grad of sum p (log p - log q) by autograd."""
    rng = np.random.default_rng(43)
    logits = torch.tensor(rng.normal(size=6), requires_grad=True)
    teacher = torch.tensor(rng.normal(size=6)).log_softmax(0)
    student = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    advantages = distillation_advantages(torch.zeros(6), student, teacher, coefficient=1.0, task_coefficient=0.0)
    (found,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_value_loss_and_gradient_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(23)
    values, old, returns = rng.normal(size=(3, 50))
    for clip in (0.1, 0.5, None):
        tensor = torch.tensor(values, requires_grad=True)
        loss, clipped = value_loss(tensor, torch.tensor(old), torch.tensor(returns), clip)
        loss.sum().backward()
        assert tensor.grad is not None
        for i, (v, o, r) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
            inside = v if clip is None else min(max(v, o - clip), o + clip)
            plain, bounded = (v - r) ** 2 / 2, (inside - r) ** 2 / 2
            assert loss[i].item() == pytest.approx(max(plain, bounded))
            assert bool(clipped[i]) == (bounded > plain)
            assert tensor.grad[i].item() == pytest.approx(0.0 if bounded > plain else v - r)
