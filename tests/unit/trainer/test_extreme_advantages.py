"""Advantages and moments of rewards of any magnitude, and batches of untrainable sequences."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from services.common.config.algorithm import AlgorithmConfig
from services.common.errors import InvalidRequestError, mean_and_deviation
from services.common.records import Segment
from services.trainer.advantages import Moments, normalize, over_batch_deviation, reward_moments, sequence_advantages
from tests.unit.trainer.building import VOCAB, algorithm, rank_batch, train_step, training_sequences

MOST = sys.float_info.max
REWARDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=8)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce"])
@given(rewards=REWARDS)
@example(rewards=[MOST, -MOST])
@example(rewards=[MOST, -MOST, -MOST])
@example(rewards=[1.4e154, 0.0])
def test_advantages_are_finite_for_all_finite_rewards(advantage: Any, rewards: list[float]) -> None:
    mean, deviation = mean_and_deviation(rewards)
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
