"""Calls of the GPU's attention kernels on a CPU: names, arguments, shapes and types, checked by signatures and fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.errors import ConfigError
from services.trainer.model import attention
from services.trainer.model.attention import KERNELS, Documents, register_attention, why_unusable
from services.trainer.packing import Branch

# The signature of flash_attn 2.8, and that of 2.2, which has no window.
TODAY = """(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)"""
EARLIER = """(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    return_attn_probs=False)"""


@pytest.fixture(autouse=True)
def signatures_are_read_again() -> Iterator[None]:
    attention._arguments.cache_clear()
    yield
    attention._arguments.cache_clear()
    sys.modules.pop("flash_attn", None)


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
        output = KERNELS["varlen"](*inputs, packed, 0.25)
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
    assert why_unusable("varlen") == ""
    KERNELS["varlen"](*heads(), alone(), 0.25)
    assert seen == {"heads": (4, 4, 4), "window": (-1, 0), "scale": 0.25}


def test_a_torch_without_a_window_is_refused_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, is_causal=False: query)
    with pytest.raises(
        ConfigError, match=r"varlen needs torch\.nn\.attention\.varlen\.varlen_attn with the argument scale"
    ):
        register_attention("varlen")


def install(directory: Path, signature: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package flash_attn with this signature, in front of an installed one."""
    (directory / "flash_attn").mkdir()
    (directory / "flash_attn" / "__init__.py").write_text(f"def flash_attn_varlen_func{signature}:\n    {body}\n")
    monkeypatch.syspath_prepend(directory)
    sys.modules.pop("flash_attn", None)


def test_flash_attn_is_called_by_its_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, TODAY, "seen.update(locals()); return q\n\nseen = {}", monkeypatch)
    assert why_unusable("flash_attn") == ""
    documents = shared_prefix()
    KERNELS["flash_attn"](*heads(), documents, 0.25)
    seen = sys.modules["flash_attn"].seen
    assert (seen["softmax_scale"], seen["causal"], seen["dropout_p"]) == (0.25, True, 0.0)
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (5, 9)
    assert seen["cu_seqlens_q"].tolist() == [0, 4, 7, 12] and seen["cu_seqlens_k"].tolist() == [0, 4, 11, 20]
    assert seen["k"].shape == (20, 2, 16), "flash_attn takes grouped heads"


def test_a_flash_attn_with_another_alignment_is_refused_by_its_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, EARLIER, "return q", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"flash_attn_varlen_func with the argument window_size; install a newer version"
    ):
        register_attention("flash_attn")


def test_a_flash_attn_that_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, TODAY, "return q\n\nimport flash_attn_2_cuda", monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot be imported here \(No module named 'flash_attn_2_cuda'\)"):
        register_attention("flash_attn")
