"""Computes advantages of tokens: discounted sums to the end of a sequence, GAE over a value model, and distillation.

    delta_t  = r_t + gamma V_{t+1} - V_t          (V after the last token is 0)
    A_t      = delta_t + gamma lambda A_{t+1}     (arXiv 1506.02438)
    R_t      = A_t + V_t                          the target of the value model

Time counts the trained tokens of a sequence: the environment's tokens belong to the preceding step, and have neither a
discount nor a value. With gamma = lambda = 1 and no values, A_t is the sum of the rewards from t on.

Pure functions over flat tensors in which the tokens of a sequence are neighbours, in order. The result of a token
depends on its own sequence alone, to the last bit, so it does not depend on packing.

On-policy distillation: the advantage of a student's token is its log-probability ratio of teacher to student.

    A_t = w A_task + c (log p_teacher(t) - log p_student(t))

The second term is the reverse KL of one sampled token as an advantage, with a discount of 0: a token depends on its own
gap only (arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Thinking Machines, "On-Policy Distillation", 2025). No gradient
flows through this term. p_student belongs to the policy being trained (``current``: with a loss over the ratio to the
behaviour policy this gives the gradient of the reverse KL for tokens of any age) or to the behaviour policy
(``behaviour``: a reward that is fixed before the step). On fresh data both are the same.
"""

from __future__ import annotations

import torch


def discounted_sums(values: torch.Tensor, sequence_index: torch.Tensor, factor: float) -> torch.Tensor:
    """Sum from each token to the end of its sequence, discounted by ``factor`` per step. [num_tokens] float64

    By doubling: after round k a token holds the sum over the next 2^k tokens, so n tokens take log2(n) rounds of one
    addition each.

    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), 0.5).tolist()
    [2.0, 2.0, 4.0]
    """
    sums = values.double()
    reach, weight = 1, factor
    while reach < len(sums) and weight != 0.0:
        same = sequence_index[reach:] == sequence_index[:-reach]  # tokens of one sequence are neighbours
        ahead = torch.where(same, sums[reach:], torch.zeros_like(sums[reach:]))
        sums = torch.cat([sums[:-reach] + weight * ahead, sums[-reach:]])
        reach, weight = 2 * reach, weight * weight
    return sums


def at_last_token(per_token: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
    """``per_token`` at the last token of each sequence, the place of an outcome reward, and 0 elsewhere. [num_tokens]

    >>> at_last_token(torch.tensor([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
    [0.0, 3.0, 5.0]
    """
    return torch.where(_is_last(sequence_index), per_token, torch.zeros_like(per_token))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, sequence_index: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of the trained tokens, before any whitening. [num_tokens] float64 each

    >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    >>> [t.tolist() for t in gae(rewards, values, torch.tensor([0, 0]), 1.0, 1.0)]
    [[0.5, 0.75], [1.0, 1.0]]
    """
    exact = values.double()
    following = torch.cat([exact[1:], exact.new_zeros(min(len(exact), 1))])
    following = torch.where(_is_last(sequence_index), torch.zeros_like(exact), following)
    errors = rewards.double() + gamma * following - exact
    advantages = discounted_sums(errors, sequence_index, gamma * gae_lambda)
    return advantages, advantages + exact


def _is_last(sequence_index: torch.Tensor) -> torch.Tensor:
    """Whether a token is the last trained one of its sequence. [num_tokens] bool"""
    last = torch.ones_like(sequence_index, dtype=torch.bool)
    last[:-1] = sequence_index[1:] != sequence_index[:-1]
    return last


def distillation_advantages(
    advantages: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    coefficient: float,
    task_coefficient: float,
    clamp: float,
) -> torch.Tensor:
    """Advantages with the teacher's term. All shapes [num_tokens].

    ``clamp`` bounds teacher - student, so that one token cannot dominate an update.
    """
    gap = (teacher - student.detach()).clamp(-clamp, clamp)
    return task_coefficient * advantages + coefficient * gap
