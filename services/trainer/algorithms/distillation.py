"""On-policy distillation: the student's own tokens, each paid by how much likelier the teacher finds it.

    A_t = w A_task + c (log p_teacher(t) - log p_student(t))

The second term is the reverse KL of one sampled token as an advantage, with a discount of 0: a token answers for its
own gap alone (arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Thinking Machines, "On-Policy Distillation", 2025). No
gradient flows through it. p_student is of the policy being trained (``current``: with a loss over the ratio to the
behaviour policy that is the gradient of the reverse KL, whatever the age of the token) or of the one that sampled
(``behaviour``: as a reward that is fixed before the step). On fresh data they are the same.
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
    """All shapes [num_tokens]. ``clamp`` bounds teacher - student, so that one token cannot take a whole update."""
    gap = (teacher - student.detach()).clamp(-clamp, clamp)
    return task_coefficient * advantages + coefficient * gap
