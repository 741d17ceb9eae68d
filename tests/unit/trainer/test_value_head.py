"""The value head: fitted to returns, whole in checkpoints, and nowhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.common.config.training import OptimizerConfig
from services.trainer.model.policy_model import NAME
from tests.unit.trainer.building import algorithm, rank_batch, train_step, training_sequences


def gae(**settings: Any) -> Any:
    return algorithm(
        "ppo_clip", **{"advantage": "gae", "value_head": {"coefficient": 0.5}, "gae_lambda": 0.95, **settings}
    )


def test_the_values_of_all_minibatches_are_those_of_step_start() -> None:
    """So the second minibatch is fitted to the returns that the first update has not moved."""
    sequences = training_sequences(8, minibatches=2)
    step = train_step(gae(), optimizer=OptimizerConfig(lr=1e-2))
    step.run(rank_batch(sequences))
    before = step.run(rank_batch(sequences)).as_dict()
    again = train_step(gae(), optimizer=OptimizerConfig(lr=1e-2))
    again.run(rank_batch(sequences))
    whole = again.run(rank_batch([dataclasses.replace(s, minibatch=0) for s in sequences])).as_dict()
    for name in ("value_mean", "return_mean", "explained_variance", "advantage_abs_mean"):
        assert before[name] == pytest.approx(whole[name], rel=1e-5), name


def test_the_head_has_a_learning_rate_of_its_own_on_the_schedule_of_the_policy() -> None:
    schedule = OptimizerConfig(lr=1e-3, schedule="linear", total_updates=10, weight_decay=0.1)
    step = train_step(gae(value_head={"lr": 0.5}), optimizer=schedule)
    for _ in range(6):
        step.run(rank_batch(training_sequences(4)))
    rates = {
        id(p): group["lr"] for group in step.optimizer.adamw.param_groups for p in group["params"]
    }  # of update 5: .1 + .9 / 2 of the peak
    for name, parameter in step.model.named_parameters():
        assert rates[id(parameter)] == pytest.approx((0.5 if name.startswith(NAME) else 1e-3) * 0.55), name
