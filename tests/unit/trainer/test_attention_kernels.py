"""Calls of the GPU's attention kernels on a CPU: names, arguments, shapes and types, checked by signatures and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.errors import ConfigError
from services.trainer.model.attention import Documents, attend_varlen, has_varlen, register_attention
from services.trainer.packing import Branch


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
