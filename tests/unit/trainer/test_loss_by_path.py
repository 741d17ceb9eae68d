"""A loss by import path: its inputs, and the refusal of wrong results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from services.common.errors import ConfigError
from services.trainer.losses import LossError, PolicyLoss, TokenBatch, algorithm_of
from services.trainer.model.micro_batches import MicroBatch
from tests.unit.trainer.building import algorithm, rank_batch, train_step, training_sequences

not_a_function = 3


def returned(tokens: TokenBatch, settings: Mapping[str, Any]) -> object:
    """The policy gradient, spoilt as the settings ask."""
    loss = -tokens.advantages * tokens.logprobs
    match settings["as"]:
        case "an exit":
            raise SystemExit(0)
        case "nan":
            return PolicyLoss(per_token=loss.where(torch.arange(len(loss)) != 1, torch.nan))
        case "infinity":
            return PolicyLoss(per_token=loss / 0.0)
        case "a mean":
            return PolicyLoss(per_token=loss.mean())
        case "integers":
            return PolicyLoss(per_token=loss.long())
        case "a list":
            return PolicyLoss(per_token=loss.tolist())
        case "a tensor":
            return loss
        case "a constant":
            return PolicyLoss(per_token=loss.detach())
        case "a short left_out":
            return PolicyLoss(per_token=loss, left_out=tokens.mask[:1])
        case "a listed left_out":
            return PolicyLoss(per_token=loss, left_out=tokens.mask.tolist())  # type: ignore[arg-type]
        case "a nameless count" | "a taken count":
            name = "seen" if settings["as"] == "a nameless count" else "trained_tokens"
            return PolicyLoss(per_token=loss, counts={name: tokens.mask.sum()})
        case "a count of the audit":
            return PolicyLoss(per_token=loss, counts={"zero_gradient_tokens": tokens.mask.sum()})
        case "a count of the step":
            return PolicyLoss(per_token=loss, counts={"left_out_tokens": tokens.mask.sum()})
    assert (tokens.proximal is not None) == settings["as"].startswith("proximal")
    return PolicyLoss(per_token=loss, counts={"seen_tokens": tokens.mask.sum()})


def by_path(what: str, **settings: Any) -> Any:
    return algorithm(f"{__name__}:returned", settings={"as": what}, **settings)


def test_it_trains_as_the_loss_that_it_is() -> None:
    batch = rank_batch(training_sequences(8))
    own, plain = train_step(by_path("is")).run(batch), train_step(algorithm("reinforce")).run(batch)
    assert own.grad_norm == plain.grad_norm and own.loss == plain.loss
    assert own.algorithm["seen_share"] == 1.0


def test_it_gets_proximal_log_probabilities_where_it_asks_for_them() -> None:
    train_step(by_path("proximal", proximal=True)).run(rank_batch(training_sequences(8)))


@pytest.mark.parametrize("max_tokens", [64, 10_000])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nan", "returned NaN or infinity for"),
        ("infinity", "returned NaN or infinity for"),
        ("a mean", r"returned a per_token of shape \[\] and torch.float"),
        ("integers", "torch.int64"),
        ("a list", "returned a per_token of type list"),
        ("a tensor", "returned a Tensor; expected a PolicyLoss"),
        ("a constant", "does not depend on tokens.logprobs"),
        ("a short left_out", r"returned a left_out of shape \[1\] and torch.bool"),
        ("a listed left_out", "returned a left_out of type list; expected a bool tensor"),
        ("a nameless count", "a count named 'seen'; expected names that end in _tokens"),
        ("a taken count", "a count named 'trained_tokens'"),
        ("a count of the audit", "a count named 'zero_gradient_tokens'"),
        ("a count of the step", "returned a count named 'left_out_tokens'"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_ends_the_step_before_the_optimizer(
    what: str, told: str, max_tokens: int
) -> None:
    step = train_step(by_path(what), max_tokens=max_tokens)
    before = {name: weight.clone() for name, weight in step.model.named_parameters()}
    with pytest.raises(LossError, match=told) as caught:
        step.run(rank_batch(training_sequences(8), step=5))
    assert f"{__name__}:returned at training step 5, minibatch 0," in caught.value.message
    assert "expected" in caught.value.message
    assert step.optimizer.num_updates == 0
    assert all(torch.equal(weight, before[name]) for name, weight in step.model.named_parameters())


def test_a_loss_that_leaves_is_an_error_with_its_name_and_no_end_of_the_trainer() -> None:
    with pytest.raises(RuntimeError, match=f"{__name__}:returned raised SystemExit: 0"):
        train_step(by_path("an exit")).run(rank_batch(training_sequences(8)))


def test_a_model_that_gives_nan_is_not_blamed_on_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no input of the loss is finite; the update is skipped and counted, as every other."""
    step = train_step(algorithm("ppo_clip"))

    def broken(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor, None]:
        logprobs, entropy = model(batch.token_ids, batch.position_ids, batch.documents, batch.targets, temperature)
        return logprobs * torch.nan, entropy, None

    monkeypatch.setattr("services.trainer.step.forward", broken)
    assert step.run(rank_batch(training_sequences(8))).updates_skipped == 1


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        (f"{__name__}:absent", "has no 'absent'"),
        (f"{__name__}:not_a_function", "is of type int, and no function"),
    ],
)
def test_a_path_that_leads_to_no_function_is_refused(path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        algorithm_of(algorithm(path))
