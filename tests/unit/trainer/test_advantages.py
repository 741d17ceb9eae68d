from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from services.common.config.algorithm import AlgorithmConfig
from services.common.records import Segment, StopReason, TokenSequence, TrainingSequence
from services.trainer.advantages import (
    Moments,
    normalize,
    over_batch_deviation,
    reward_moments,
    scaled_by_source,
    sequence_advantages,
)


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
