"""The value head: fitted to returns, whole in checkpoints, and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.common.config.training import OptimizerConfig
from services.common.errors import ConfigError, ModelMismatchError
from services.common.text.chat import load_tokenizer
from services.trainer.checkpoints import CheckpointIdentity, Checkpoints, export
from services.trainer.model.policy_model import NAME, build_policy_model, load_policy_model
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences
from tests.unit.trainer_service.building import save_model


def gae(**settings: Any) -> Any:
    return algorithm(
        "ppo_clip", **{"advantage": "gae", "value_head": {"coefficient": 0.5}, "gae_lambda": 0.95, **settings}
    )


def head_of(step: TrainStep) -> dict[str, torch.Tensor]:
    assert step.model.value_head is not None
    return {name: p.detach().clone() for name, p in step.model.value_head.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advantage": "gae"}, "needs a value head"),
        ({"advantage": "grpo", "value_head": {}}, "value_head is set, and advantage: grpo does not read it"),
        ({"gae_lambda": 0.9}, "gae_lambda is 0.9, and advantage: grpo does not read it"),
        (
            {"gamma": 0.9},
            "gamma is 0.9, and advantage: grpo does not read it: leave gamma out, or write advantage: gae or reinforce",
        ),
        ({"advantage": "max_rl", "reward_scale": 2.0}, "max_rl needs rewards from 0 to 1: leave reward_bias"),
    ],
)
def test_settings_that_the_advantage_does_not_read_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        algorithm("ppo_clip", **settings)


def test_a_step_refuses_a_model_without_the_head_that_its_settings_name() -> None:
    plain, step = build_policy_model(tiny_causal_lm(), Ranks.single()), train_step(gae())
    with pytest.raises(ConfigError, match="value_head"):
        TrainStep(plain, step.optimizer, gae(), Ranks.single(), max_tokens_per_micro_batch=64)


def test_a_new_head_says_0_and_the_first_advantages_are_the_returns() -> None:
    metrics = train_step(gae(gae_lambda=1.0)).run(rank_batch(training_sequences(8))).as_dict()
    sequences = training_sequences(8)
    tokens = [s.sequence.num_trained_tokens for s in sequences]
    mean = sum(s.sequence.reward * n for s, n in zip(sequences, tokens, strict=True)) / sum(tokens)
    assert metrics["value_mean"] == metrics["explained_variance"] == 0.0
    assert metrics["return_mean"] == pytest.approx(mean)
    assert metrics["advantage_abs_mean"] == pytest.approx(mean), "rewards of 0 and 1"
    assert metrics["value_loss"] == pytest.approx(mean / 2)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_head_fits_the_returns(clip: float | None) -> None:
    """Repeated training on the same sequences reduces the unexplained variance."""
    step = train_step(
        gae(gae_lambda=1.0, gamma=0.95, value_head={"coefficient": 1.0, "clip": clip, "lr": 3e-2}),
        optimizer=OptimizerConfig(lr=2e-3, max_grad_norm=None),
    )
    batch = rank_batch(training_sequences(12, seed=3))
    found = [step.run(batch).as_dict() for _ in range(60)]
    assert found[0]["explained_variance"] == 0.0
    assert found[-1]["explained_variance"] > 0.8
    assert found[-1]["value_loss"] < 0.25 * found[0]["value_loss"]


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


def test_a_step_that_stops_early_still_tells_of_all_its_returns() -> None:
    batch = rank_batch(training_sequences(8, minibatches=2))
    whole = train_step(gae()).run(batch).as_dict()
    metrics = train_step(gae().model_copy(update={"early_stop_ratio": 1e-6})).run(batch).as_dict()
    assert metrics["updates_applied"] == 0
    for name in ("return_mean", "value_mean", "explained_variance"):
        assert metrics[name] == whole[name], name


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


def test_replicas_and_exports_get_the_model_without_its_head(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    model, tokenizer = load_policy_model(source, Ranks.single(), value_head=True), load_tokenizer(source)
    assert model.value_head is not None and not model.value_head.weight.any(), "its memory came after its making"
    names = {name for name, _ in model.causal_lm.named_parameters()}
    writer = Snapshots(model, Ranks.single(), run_id="r", policy="p", dtype="float32", directories=[tmp_path])
    written = writer.write(1)
    assert written is not None
    assert {tensor.name for tensor in written.manifest.tensors} == names
    export(model, tokenizer, tmp_path / "export", Ranks.single(), torch.float32)
    assert {n for n, _ in load_policy_model(tmp_path / "export", Ranks.single()).causal_lm.named_parameters()} == names


def test_training_with_a_head_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path) -> None:
    settings = gae(value_head={"lr": 0.1})
    checkpoints = Checkpoints(tmp_path, CheckpointIdentity(run_id="r", policy="p"), 2, Ranks.single())
    straight = train_step(settings)
    straight.run(rank_batch(training_sequences(8, seed=1)))
    checkpoints.save(1, straight.model, straight.optimizer)
    straight.run(rank_batch(training_sequences(8, seed=2)))

    resumed = train_step(settings, causal_lm=tiny_causal_lm(seed=9))
    checkpoints.load(1, resumed.model, resumed.optimizer)
    resumed.run(rank_batch(training_sequences(8, seed=2)))
    assert any(value.any() for value in head_of(straight).values())
    for (name, expected), (_, found) in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, found), name

    without = train_step(algorithm("ppo_clip"))
    with pytest.raises(ModelMismatchError, match="value_head"):
        checkpoints.load(1, without.model, without.optimizer)
