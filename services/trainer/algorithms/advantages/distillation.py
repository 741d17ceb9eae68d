"""On-policy distillation: the advantage of a student's token is its log-probability ratio of teacher to student.

    A_t = w A_task + c (log p_teacher(t) - log p_student(t))

The second term is the reverse KL of one sampled token as an advantage, with a discount of 0: a token depends on its own
gap only (arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Thinking Machines, "On-Policy Distillation", 2025). No gradient
flows through this term. p_student belongs to the policy being trained (``current``: with a loss over the ratio to the
behaviour policy this gives the gradient of the reverse KL for tokens of any age) or to the behaviour policy
(``behaviour``: a reward that is fixed before the step). On fresh data both are the same.
"""

from __future__ import annotations

import torch


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
