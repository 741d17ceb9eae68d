from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.kept_tokens import KeptSets
from services.trainer.model.logprobs import Drawn, KeptBlocks, token_logprobs


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype: torch.dtype, tokens: int = 13, vocab: int = 29) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = (2 * torch.randn(vocab, 8, dtype=dtype)).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunks", [(4, 7), (1, 1), (100, 100), (13, 29)])
def test_values_and_gradients_equal_the_naive_ones(temperature: float, chunks: tuple[int, int]) -> None:
    hidden, weight, targets = inputs(torch.float64)
    upstream = torch.randn(2, len(targets), dtype=torch.float64)
    results = []
    for function in (lambda: token_logprobs(hidden, weight, targets, temperature, *chunks),
                     lambda: naive(hidden, weight, targets, temperature)):  # fmt: skip
        logprobs, entropy = function()
        loss = (logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum()
        results.append([logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def drawn_of(kept: list[set[int] | None], temperatures: list[float] | None, vocab: int = 29) -> Drawn:
    """``kept``: the ids that could be drawn for each target, None for all. Half of them are written as left-out ids."""
    rows, ids, left_out = [], [], []
    for i, own in enumerate(kept):
        left_out.append(own is None or i % 2 == 0)
        chosen = set() if own is None else set(range(vocab)) - own if i % 2 == 0 else own
        rows += [i] * len(chosen)
        ids += sorted(chosen)
    sets = KeptSets(np.array(left_out), np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64))
    return Drawn(
        kept=KeptBlocks.on(sets, torch.device("cpu")),
        temperatures=None if temperatures is None else torch.tensor(temperatures, dtype=torch.float64),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.none() | st.sets(st.integers(0, 28), max_size=29), min_size=13, max_size=13),
    st.none() | st.lists(st.sampled_from([math.nan, 0.5, 1.3]), min_size=13, max_size=13),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([(4, 7), (1, 1), (100, 100), (13, 29)]),
)
def test_kept_sets_and_temperatures_of_tokens_equal_a_masked_softmax(
    kept: list[set[int] | None], temperatures: list[float] | None, temperature: float, chunks: tuple[int, int]
) -> None:
    hidden, weight, targets = inputs(torch.float64)
    kept = [own if own is None else own | {int(t)} for own, t in zip(kept, targets, strict=True)]
    upstream = torch.randn(2, len(targets), dtype=torch.float64)
    own_temperature = torch.tensor(
        [temperature if math.isnan(t) else t for t in temperatures or [math.nan] * 13], dtype=torch.float64
    )
    hide = torch.tensor([[own is not None and v not in own for v in range(29)] for own in kept])

    def masked() -> tuple[torch.Tensor, torch.Tensor]:
        logits = (hidden @ weight.T / own_temperature[:, None]).masked_fill(hide, -torch.inf)
        log_p = logits.log_softmax(-1)
        finite = log_p.masked_fill(hide, 0.0)
        return log_p.gather(1, targets[:, None])[:, 0], -(finite.exp().masked_fill(hide, 0.0) * finite).sum(-1)

    drawn = drawn_of(kept, None if temperatures is None else own_temperature.tolist())
    results = []
    for function in (lambda: token_logprobs(hidden, weight, targets, temperature, *chunks, drawn=drawn), masked):
        logprobs, entropy = function()
        loss = (logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum()
        results.append([logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_token_that_alone_could_be_drawn_has_log_probability_and_gradient_zero() -> None:
    hidden, weight, targets = inputs(torch.float32)
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, 0.7, 4, 7, drawn=drawn_of([{int(t)} for t in targets], None)
    )
    assert not logprobs.detach().any() and not entropy.detach().any()
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(torch.float32)
    logprobs, entropy = token_logprobs(hidden * 1e4, weight, targets, 1.0, 4, 7)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(hidden, weight, targets)
    expected, _ = naive(hidden.float(), weight.float(), targets, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


class _LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_no_tensor_is_larger_than_a_block_or_an_input() -> None:
    hidden, weight, targets = inputs(torch.float32, tokens=512, vocab=4096)
    with _LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0, 64, 256)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.num_elements <= max(64 * 256, weight.numel(), hidden.numel())
    with _LargestTensor() as largest:
        naive(hidden, weight, targets, 1.0)
    assert largest.num_elements == 512 * 4096
