from __future__ import annotations

import math

import pytest
import torch

from services.common.config.training import OptimizerConfig
from services.common.errors import ConfigError
from services.trainer.model.optimizer import PolicyOptimizer, learning_rate


def optimizer(config: OptimizerConfig) -> tuple[PolicyOptimizer, torch.nn.Module]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.RMSNorm(3))
    return PolicyOptimizer(module.named_parameters(), config), module


def test_linear_schedule_with_warmup() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_updates=3, total_updates=13, final_fraction=0.2)
    rates = [learning_rate(config, u) for u in (0, 1, 2, 3, 8, 13, 99)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2, 0.2])


def test_the_norm_is_measured_before_clipping_and_bounds_the_gradient() -> None:
    opt, module = optimizer(OptimizerConfig(lr=1e-3, max_grad_norm=0.5))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    expected = math.sqrt(sum(p.numel() for p in module.parameters()))
    seen: list[torch.Tensor] = []
    opt.adamw.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    )
    assert opt.update().grad_norm == pytest.approx(expected)
    assert seen[0].norm().item() == pytest.approx(0.5, rel=1e-4)


def test_norms_and_biases_do_not_decay() -> None:
    opt, module = optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    opt.update()
    for name, p in module.named_parameters():
        expected = before[name] * (0.95 if p.ndim == 2 else 1.0)
        torch.testing.assert_close(p.detach(), expected)


def test_an_update_equals_adamw_by_hand() -> None:
    opt, module = optimizer(OptimizerConfig(lr=0.1, max_grad_norm=None))
    p = module[0].weight  # type: ignore[index]
    before = p.detach().clone()
    for q in module.parameters():
        q.grad = torch.full_like(q, 2.0)
    opt.update()
    torch.testing.assert_close(p.detach(), before - 0.1 * 2.0 / (2.0 + 1e-8))  # bias-corrected first step


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs total_updates"):
        optimizer(OptimizerConfig(schedule="linear"))
