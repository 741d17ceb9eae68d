from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from services.common.errors import ConfigError, ModelMismatchError
from services.trainer.model.attention import (
    Branch,
    Documents,
    attend_varlen,
    documents_attention,
    has_varlen,
    register_attention,
)
from services.trainer.model.logprobs import Targets
from services.trainer.model.policy_model import rms_norm, speed_up_norms
from tests.unit.trainer.building import algorithm, tiny_causal_lm, train_step

LENGTHS = [9, 5, 5, 5, 1, 1, 7]


def packed_inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], Documents, np.ndarray]:
    torch.manual_seed(0)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    tensors = [torch.randn(1, int(offsets[-1]), heads, 8, dtype=dtype).transpose(1, 2) for heads in (4, 2, 2)]
    return [t.requires_grad_() for t in tensors], Documents.from_offsets(offsets), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_documents_are_bit_equal_to_single_ones_forward_and_backward(dtype: torch.dtype) -> None:
    inputs, documents, offsets = packed_inputs(dtype)
    module = torch.nn.Identity()
    output, _ = documents_attention(module, *inputs, scaling=0.3, documents=documents)
    weight = torch.randn_like(output)
    packed_grads = torch.autograd.grad((output * weight).sum(), inputs)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        single = [t.detach()[:, :, start:end].requires_grad_() for t in inputs]
        expected = scaled_dot_product_attention(*single, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert torch.equal(output[:, start:end], expected)
        grads = torch.autograd.grad((expected * weight[:, start:end]).sum(), single)
        for packed_grad, grad in zip(packed_grads, grads, strict=True):
            assert torch.equal(packed_grad[:, :, start:end], grad)


@pytest.mark.parametrize("tied", [True, False])
def test_the_packed_model_equals_transformers_on_each_document_alone(tied: bool) -> None:
    step = train_step(algorithm(), causal_lm=tiny_causal_lm(tied=tied))
    plain: Qwen3ForCausalLM = tiny_causal_lm(tied=tied)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    token_ids = torch.randint(0, 31, (int(offsets[-1]),))
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])
    targets = torch.cat([torch.arange(s + 1, e) for s, e in itertools.pairwise(offsets)])
    logprobs, _ = step.model(
        token_ids, position_ids, Documents.from_offsets(offsets), Targets.at(targets, token_ids), 1.0
    )
    expected = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids = token_ids[start:end]
        alone = plain(input_ids=ids[None]).logits[0].log_softmax(-1)
        expected.append(alone[:-1].gather(1, ids[1:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=0, atol=1e-5)


def test_a_model_that_drops_the_documents_is_refused() -> None:
    inputs, _, _ = packed_inputs(torch.float32)
    with pytest.raises(ModelMismatchError, match="does not pass keyword arguments"):
        documents_attention(torch.nn.Identity(), *inputs, documents=None)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"sliding_window": 4}])
def test_arguments_that_packed_attention_lacks_are_refused(extra: dict[str, object]) -> None:
    inputs, documents, _ = packed_inputs(torch.float32)
    with pytest.raises(ModelMismatchError):
        documents_attention(torch.nn.Identity(), *inputs, documents=documents, **extra)  # type: ignore[arg-type]


def test_a_kernel_that_was_asked_for_is_taken_or_refused_never_replaced() -> None:
    inputs, documents, _ = packed_inputs(torch.float32)
    with pytest.raises(ConfigError, match=r"trainer.attention: varlen runs on a GPU in 16 bits, not on cpu"):
        documents_attention(torch.nn.Identity(), *inputs, documents=documents, kernel="varlen")


# -- Calls of the GPU's attention kernels on a CPU: names, arguments, shapes and types, checked by signatures and f


@pytest.fixture(autouse=True)
def signatures_are_read_again() -> Iterator[None]:
    has_varlen.cache_clear()
    yield
    has_varlen.cache_clear()


def shared_prefix() -> Documents:
    """Two documents of 7 and 9 tokens that begin with the same four."""
    return Documents(
        [Branch(0, 4, np.zeros(0, dtype=np.int64)), Branch(4, 3, np.arange(4)), Branch(7, 5, np.arange(4))]
    )


def alone() -> Documents:
    return Documents.from_offsets(np.array([0, 5, 12]))


def heads(num_query: int = 4, num_kv: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(12, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (num_query, num_kv, num_kv)]


class _Calls(TorchDispatchMode):
    """Notes the shapes of the first three arguments of each call of the varlen kernel, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[tuple[int, ...]]] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.__name__)
        if func.__name__.startswith("_varlen_attn."):
            self.shapes.append([tuple(tensor.shape) for tensor in args[:3]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("documents", "num_keys"), [(alone, 12), (shared_prefix, 4 + 7 + 9)])
def test_torch_varlen_takes_grouped_heads_as_they_are(documents: Any, num_keys: int) -> None:
    """The operator refuses a wrong argument, type or number of heads; copies of key-value heads cost their memory."""
    packed = documents()
    offsets = packed.offsets, packed.key_offsets, packed.key_rows  # real: from numpy
    with FakeTensorMode(allow_non_fake_inputs=True), _Calls() as calls:
        inputs = heads()
        output = attend_varlen(*inputs, packed, 0.25)
        assert output.shape == (12, 4, 16) and output.dtype == torch.bfloat16
        gradients = torch.autograd.grad(output.float().sum(), inputs)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert calls.shapes == [[(12, 4, 16), (num_keys, 2, 16), (num_keys, 2, 16)]]
    assert not any("repeat" in name for name in calls.names)
    assert offsets[0].dtype == offsets[1].dtype == torch.int32


def test_a_torch_without_grouped_heads_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        seen.update(heads=(q.shape[1], k.shape[1], v.shape[1]), window=window_size, scale=scale)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert has_varlen()
    attend_varlen(*heads(), alone(), 0.25)
    assert seen == {"heads": (4, 4, 4), "window": (-1, 0), "scale": 0.25}


def test_a_torch_without_a_window_is_refused_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, is_causal=False: query)
    with pytest.raises(ConfigError, match=r"trainer\.attention: varlen needs torch 2\.10 or newer"):
        register_attention("varlen")


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
