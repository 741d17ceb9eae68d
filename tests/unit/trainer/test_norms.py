from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from services.trainer.model.policy_model import rms_norm, speed_up_norms
from tests.unit.trainer.building import tiny_causal_lm

CPU = torch.device("cpu")


def norm() -> Qwen3RMSNorm:
    torch.manual_seed(0)
    module = Qwen3RMSNorm(12)
    torch.nn.init.normal_(module.weight)
    return module


def test_the_forward_pass_keeps_every_bit() -> None:
    module, x = norm(), torch.randn(5, 3, 12)
    expected = module(x)
    assert speed_up_norms(module, CPU) == 1
    assert torch.equal(module(x), expected)


def test_mixed_precision_keeps_the_original() -> None:
    module, x = norm().bfloat16(), torch.randn(5, 12).bfloat16()
    expected = module(x)
    fast = norm()
    speed_up_norms(fast, CPU)
    assert torch.equal(fast.bfloat16()(x), expected)


@pytest.mark.parametrize("shape", [(12,), (4, 12), (2, 3, 4, 12), (0, 12)])
def test_gradients_equal_autograds(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, upstream = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    plain = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    expected = torch.autograd.grad(plain, (x, weight), upstream)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_norm_of_another_formula_is_left_alone() -> None:
    module = GemmaRMSNorm(12)
    torch.nn.init.normal_(module.weight)
    assert speed_up_norms(module, CPU) == 0


def test_every_norm_of_a_model_is_found() -> None:
    assert speed_up_norms(tiny_causal_lm(), CPU) == 2 * 4 + 1
