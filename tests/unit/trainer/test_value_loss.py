from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.losses import value_loss


def test_value_loss_and_gradient_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(23)
    values, old, returns = rng.normal(size=(3, 50))
    for clip in (0.1, 0.5, None):
        tensor = torch.tensor(values, requires_grad=True)
        loss, clipped = value_loss(tensor, torch.tensor(old), torch.tensor(returns), clip)
        loss.sum().backward()
        assert tensor.grad is not None
        for i, (v, o, r) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
            inside = v if clip is None else min(max(v, o - clip), o + clip)
            plain, bounded = (v - r) ** 2 / 2, (inside - r) ** 2 / 2
            assert loss[i].item() == pytest.approx(max(plain, bounded))
            assert bool(clipped[i]) == (bounded > plain)
            assert tensor.grad[i].item() == pytest.approx(0.0 if bounded > plain else v - r)


def test_a_value_that_overshoots_toward_its_return_stops_and_one_that_strays_does_not() -> None:
    values = torch.tensor([0.5, -0.5], requires_grad=True)
    loss, _ = value_loss(values, torch.zeros(2), torch.ones(2), 0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, -1.5]
