"""Computes advantages of single tokens from those of sequences, before the first update of a training step.

    reward of a token   the sequence's advantage at its last trained token, minus kl_reward_coefficient * (b - ref)
    advantage           discounted sum of these to the end of the sequence, or GAE over the value head's values
    then                normalised over the global batch, if the settings ask for this
    beside this         the teacher's log-probabilities, which enter the advantage of a loss (``distillation``);
                        they come with the sequences, or from a model in this process

KL in the reward is k1 (b: the log-probability under the sampling engine). Unlike in a loss, k1 has the right gradient
here, because the gradient passes through the score function, and each token pays for the tokens after it
(REINFORCE++, arXiv 2501.03262). Values come from the weights at step start, so engines do not compute them. Each
additional model costs one forward pass over the batch, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.records.types import MinibatchTotals
from services.trainer.algorithms.advantages.sequences import Moments
from services.trainer.algorithms.advantages.tokens import at_last_token, discounted_sums, distillation_advantages, gae
from services.trainer.algorithms.base import aggregate, kl_per_token
from services.trainer.algorithms.losses.value_loss import value_loss
from services.trainer.model.policy_model import PolicyModel, Scorer
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.metrics import Sums
from services.trainer.step.micro_batches import MicroTensors, forward, forward_with_values

Minibatches = Seq[Seq[MicroTensors]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditModels:
    """The models that contribute to credit, as far as the settings ask for them."""

    policy: PolicyModel  # with a value head for GAE
    reference: Scorer | None = None
    teacher: PolicyModel | None = None


@torch.no_grad()
def with_credit(
    minibatches: Minibatches,
    models: CreditModels,
    config: AlgorithmConfig,
    ranks: Ranks,
    sums: Sums,
    *,
    temperature: float,
    on_progress: Callable[[], None],
) -> list[list[MicroTensors]]:
    """The micro-batches with an advantage per token. A collective when the models are sharded."""
    result: list[list[MicroTensors]] = []
    for minibatch in minibatches:
        result.append([])
        for batch in minibatch:
            result[-1].append(_credited(batch, models, config, sums, temperature))
            on_progress()
    if config.batch_normalize_advantages:
        result = _normalized(result, ranks, config)
    for minibatch in result:
        for batch in minibatch:
            # Here with the behaviour policy's log-probabilities: the updates compute the policy's own.
            taught = with_teacher(batch, batch.behaviour, config)
            sums.add("advantage_abs", taught.advantages.abs().sum(dtype=torch.float64))
    return result


def with_teacher(batch: MicroTensors, logprobs: torch.Tensor, config: AlgorithmConfig) -> MicroTensors:
    """Add the teacher's term to the advantages, given the policy's own log-probabilities. No change without a teacher."""
    if config.distillation is None or batch.teacher is None:
        return batch
    advantages = distillation_advantages(
        batch.advantages,
        logprobs if config.distillation.student == "current" else batch.behaviour,
        batch.teacher,
        coefficient=config.distillation.coefficient,
        task_coefficient=config.distillation.task_coefficient,
        clamp=config.log_ratio_clamp,
    )
    return replace(batch, advantages=advantages)


def value_loss_share(
    batch: MicroTensors, values: torch.Tensor, totals: MinibatchTotals, config: AlgorithmConfig, sums: Sums
) -> torch.Tensor:
    """This micro-batch's share of the weighted value loss of the minibatch. []

    Over all trained tokens, also those that a policy loss leaves out: they have a return all the same. ``values`` come
    from the current weights and carry the gradient.
    """
    head = config.value_head
    assert head is not None and batch.old_values is not None and batch.returns is not None
    per_token, clipped = value_loss(values, batch.old_values, batch.returns, head.clip)
    everything = torch.ones_like(clipped)
    loss = aggregate(per_token, everything, batch.sequence_index, batch.num_sequences, totals, config)
    sums.add("value_loss", loss)
    sums.add("value_clipped_tokens", clipped.sum())
    return head.coefficient * loss


def _credited(
    batch: MicroTensors, models: CreditModels, config: AlgorithmConfig, sums: Sums, temperature: float
) -> MicroTensors:
    index, dtype = batch.sequence_index, batch.advantages.dtype
    sums.add("credited", batch.num_targets)
    rewards = at_last_token(batch.advantages.double(), index)
    if config.kl_reward_coefficient > 0.0:
        assert models.reference is not None
        reference, _ = forward(models.reference, batch, temperature)
        kl = kl_per_token(batch.behaviour, reference, "k1", config.log_ratio_clamp)
        sums.add("kl_reference", kl.sum())
        rewards = rewards - config.kl_reward_coefficient * kl.double()
    if models.teacher is not None:
        teacher, _ = forward(models.teacher, batch, temperature)
        batch = replace(batch, teacher=teacher)
    if config.distillation is not None and batch.teacher is not None:
        sums.add("distillation_kl", (batch.behaviour - batch.teacher).sum(dtype=torch.float64))
    if config.advantage == "gae":
        _, _, values = forward_with_values(models.policy, batch, temperature)
        assert values is not None
        advantages, returns = gae(rewards, values, index, config.gamma, config.gae_lambda)
        _add_fit(sums, values.double(), returns)
        batch = replace(batch, old_values=values, returns=returns.to(values.dtype))
    else:
        advantages = discounted_sums(rewards, index, config.gamma)
    return replace(batch, advantages=advantages.to(dtype))


def _add_fit(sums: Sums, values: torch.Tensor, returns: torch.Tensor) -> None:
    """Add the sums from which ``explained_variance`` is computed."""
    errors = returns - values
    sums.add("value", values.sum())
    for name, numbers in (("return", returns), ("value_error", errors)):
        sums.add(name, numbers.sum())
        sums.add(f"{name}_squared", numbers.square().sum())


def _normalized(minibatches: Minibatches, ranks: Ranks, config: AlgorithmConfig) -> list[list[MicroTensors]]:
    """Normalise to mean 0 and standard deviation 1 over the trained tokens of the global batch."""
    own = [batch.advantages.double() for minibatch in minibatches for batch in minibatch]
    flat = torch.cat(own) if own else torch.zeros(0, dtype=torch.float64, device=ranks.device)
    count = torch.tensor(float(len(flat)), dtype=torch.float64, device=flat.device)
    moments = Moments(*ranks.sum(torch.stack([count, flat.sum(), flat.square().sum()])).tolist())
    divisor = moments.divisor(config)
    return [
        [
            replace(b, advantages=((b.advantages.double() - moments.mean) / divisor).to(b.advantages.dtype))
            for b in minibatch
        ]
        for minibatch in minibatches
    ]
