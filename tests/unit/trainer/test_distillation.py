from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.advantages import distillation_advantages


def test_a_token_is_paid_by_how_much_likelier_the_teacher_finds_it() -> None:
    rng = np.random.default_rng(41)
    task, student, teacher = rng.normal(-2.0, 1.0, size=(3, 20))
    found = distillation_advantages(
        torch.tensor(task), torch.tensor(student, requires_grad=True), torch.tensor(teacher),
        coefficient=0.7, task_coefficient=0.25,
    )  # fmt: skip
    assert found.tolist() == pytest.approx((0.25 * task + 0.7 * (teacher - student)).tolist())
    assert not found.requires_grad


def test_one_token_cannot_take_a_whole_update() -> None:
    found = distillation_advantages(
        torch.zeros(2), torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0]),
        coefficient=1.0, task_coefficient=1.0,
    )  # fmt: skip
    assert found.tolist() == [-20.0, 20.0]


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Summed over all tokens with their probabilities: grad of sum p (log p - log q) by autograd."""
    rng = np.random.default_rng(43)
    logits = torch.tensor(rng.normal(size=6), requires_grad=True)
    teacher = torch.tensor(rng.normal(size=6)).log_softmax(0)
    student = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    advantages = distillation_advantages(torch.zeros(6), student, teacher, coefficient=1.0, task_coefficient=0.0)
    (found,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
    torch.testing.assert_close(found, expected)
