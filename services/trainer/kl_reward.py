"""KL in the reward: every sampled token pays for leaving the reference model, and for what follows it.

    reward of a token      -coefficient * (b - ref)                  (k1; b is what the engine sampled with)
    advantage of a token   A + the sum of these from the token to the end of its sequence   (gamma = lambda = 1)

Unlike KL in the loss, k1 has the right gradient here: it goes through the score function. Batch normalisation, where it
is asked for, comes afterwards and per token, as in REINFORCE++ (arXiv 2501.03262). Costs one forward pass of the
reference model over the batch, without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from services.common.config.algorithm import AlgorithmConfig
from services.trainer.algorithms.kl import kl_per_token
from services.trainer.metrics import Sums
from services.trainer.micro_batches import MicroTensors, forward
from services.trainer.model import PolicyModel
from services.trainer.sharding import Ranks

Minibatches = Seq[Seq[MicroTensors]]


def sum_to_end(values: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum from each token to the end of its sequence; the tokens of a sequence are neighbours. [num_tokens] float64

    >>> sum_to_end(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), 2).tolist()
    [3.0, 2.0, 4.0]
    """
    exact = values.double()
    ends = torch.zeros(num_sequences, dtype=torch.float64, device=values.device).index_add(0, sequence_index, exact)
    up_to = exact.cumsum(0)
    return ends.cumsum(0)[sequence_index] - up_to + exact


@torch.no_grad()
def with_kl_reward(
    minibatches: Minibatches,
    reference: PolicyModel,
    config: AlgorithmConfig,
    ranks: Ranks,
    sums: Sums,
    *,
    temperature: float,
) -> list[list[MicroTensors]]:
    """The same micro-batches with the penalty in their advantages. Every rank calls it (the model may be sharded)."""
    result: list[list[MicroTensors]] = []
    for minibatch in minibatches:
        result.append([])
        for batch in minibatch:
            reference_logprobs, _ = forward(reference, batch, temperature)
            kl = kl_per_token(batch.behaviour, reference_logprobs, "k1", config.log_ratio_clamp)
            sums.add("kl_reference", kl.sum())
            penalty = config.kl_reward_coefficient * sum_to_end(kl, batch.sequence_index, batch.num_sequences)
            result[-1].append(replace(batch, advantages=(batch.advantages - penalty).to(batch.advantages.dtype)))
    return _normalized(result, ranks, config.advantage_eps) if config.batch_normalize_advantages else result


def _normalized(minibatches: Minibatches, ranks: Ranks, eps: float) -> list[list[MicroTensors]]:
    """Mean 0 and standard deviation 1 over the trained tokens of the global batch."""
    own = [batch.advantages.double() for minibatch in minibatches for batch in minibatch]
    flat = torch.cat(own) if own else torch.zeros(0, dtype=torch.float64, device=ranks.device)
    moments = ranks.sum(
        torch.stack([torch.tensor(float(len(flat)), device=flat.device), flat.sum(), flat.square().sum()])
    )
    tokens, total, squares = moments.tolist()
    if not tokens:
        return [list(minibatch) for minibatch in minibatches]
    mean = total / tokens
    std = max(squares / tokens - mean**2, 0.0) ** 0.5
    return [
        [
            replace(b, advantages=((b.advantages.double() - mean) / (std + eps)).to(b.advantages.dtype))
            for b in minibatch
        ]
        for minibatch in minibatches
    ]
