"""Causal attention over packed documents, registered with transformers under a name for each choice of kernel.

Tokens see only earlier tokens of their own document; no mask is ever built. The offsets travel as the keyword
argument ``documents`` through the model's forward pass, not in a global or a context variable: gradient checkpointing
recomputes layers on autograd's own threads, where a context variable of the caller does not exist.

* CPU: one ``is_causal`` SDPA call per run of equally long neighbours. Attention treats batch rows alone, so every
  document's result is bit-equal to the same document alone.
* GPU, 16-bit: torch's varlen flash attention, or the ``flash_attn`` package; else the CPU path, which also runs there.
  A kernel that was asked for by name is taken or refused, never replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.common.errors import ConfigError, ModelMismatchError

Kernel = Literal["auto", "varlen", "flash_attn", "sdpa"]

_PACKAGES = {"varlen": "torch.nn.attention.varlen", "flash_attn": "flash_attn"}
_AMPERE = (8, 0)  # what flash attention needs

# Arguments that change the result and that the functions here do not implement: refuse, never ignore.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")

VarlenKernel = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "Documents", float | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Documents:
    """Where documents begin and end in a packed row."""

    runs: tuple[tuple[int, int], ...]  # (number of documents, their length), neighbours of equal length together
    max_length: int
    offsets: torch.Tensor  # [num_documents + 1] int32, on the model's device

    @property
    def num_pairs(self) -> int:
        """How many (token, token that it sees) there are, itself included."""
        return sum(count * length * (length + 1) // 2 for count, length in self.runs)

    @classmethod
    def from_offsets(cls, offsets: npt.NDArray[np.int64], device: torch.device | str = "cpu") -> Documents:
        """
        >>> Documents.from_offsets(np.array([0, 3, 6, 8])).runs
        ((2, 3), (1, 2))
        """
        runs: list[tuple[int, int]] = []
        for length in np.diff(offsets).tolist():
            if runs and runs[-1][1] == length:
                runs[-1] = (runs[-1][0] + 1, length)
            else:
                runs.append((1, length))
        return cls(
            runs=tuple(runs),
            max_length=max((length for _, length in runs), default=0),
            offsets=torch.as_tensor(offsets, dtype=torch.int32, device=device),
        )


def register_attention(kernel: Kernel = "auto") -> str:
    """Make packed attention with this kernel known to transformers; returns its name there. Repeating it changes nothing.

    Raises ``ConfigError`` when the kernel is not installed.
    """
    if kernel in _PACKAGES and not _is_installed(kernel):
        raise ConfigError(
            f"trainer.attention: {kernel} needs the package {_PACKAGES[kernel]}, which is not installed here; "
            "install it, or write auto"
        )
    name = f"millrace_documents_{kernel}"
    AttentionInterface.register(name, partial(documents_attention, kernel=kernel))
    return name


def documents_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    kernel: Kernel = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The signature transformers calls; returns [1, num_tokens, num_heads, head_dim]."""
    name = type(module).__name__
    if documents is None:
        raise ModelMismatchError(f"{name} was not given documents=; its model does not pass keyword arguments through")
    unsupported = [k for k in _UNSUPPORTED if kwargs.get(k) is not None]
    if unsupported or attention_mask is not None or dropout:
        raise ModelMismatchError(f"{name} asks for {unsupported or 'a mask or dropout'}, which packed attention lacks")
    if sliding_window is not None and documents.max_length > sliding_window:
        raise ModelMismatchError(
            f"{name} has a sliding window of {sliding_window}; a document of {documents.max_length} tokens exceeds it"
        )
    varlen = _varlen_kernel(kernel, query)
    if varlen is None:
        return attend_by_runs(query, key, value, documents, scaling), None
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [num_tokens, heads, head_dim]
    return varlen(q, k, v, documents, scaling).unsqueeze(0), None


def attend_by_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    """One SDPA call per run. [1, heads, num_tokens, head_dim] -> [1, num_tokens, num_heads, head_dim]"""
    grouped = key.shape[1] != query.shape[1]
    sizes = [count * length for count, length in documents.runs]
    outputs = []
    # split, not slices: the backward of a split is one concatenation, that of each slice a zero-filled full row.
    for (count, length), q, k, v in zip(
        documents.runs, *(t.squeeze(0).split(sizes, dim=1) for t in (query, key, value)), strict=True
    ):
        # [count, heads, length, head_dim]
        q, k, v = (t.unflatten(1, (count, length)).transpose(0, 1) for t in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs).unsqueeze(0)


def _varlen_kernel(kernel: Kernel, query: torch.Tensor) -> VarlenKernel | None:
    """The kernel for variable lengths to call, None for SDPA by runs."""
    if kernel == "sdpa":
        return None
    fits = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if kernel == "auto":
        return _best_kernel(query.device) if fits else None
    if not fits:
        raise ConfigError(
            f"trainer.attention: {kernel} runs on a GPU in 16 bits, not on {query.device.type} in {query.dtype}: "
            "write auto, or trainer.compute_dtype: bfloat16"
        )
    return KERNELS[kernel]


@cache
def _best_kernel(device: torch.device) -> VarlenKernel | None:
    """The first kernel that is installed, None when there is none or the GPU is too old for them."""
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    return next((function for name, function in KERNELS.items() if _is_installed(name)), None)


def _is_installed(kernel: str) -> bool:
    return importlib.util.find_spec(_PACKAGES[kernel]) is not None


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    offsets, longest = documents.offsets, documents.max_length
    output = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, longest, longest,
        scale=scaling, window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)  # a pair only where the log-sum-exp is asked for
    return output


def _flash_attn_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    offsets, longest = documents.offsets, documents.max_length
    output: torch.Tensor = flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, softmax_scale=scaling, causal=True
    )
    return output


KERNELS: dict[str, VarlenKernel] = {"varlen": _torch_varlen, "flash_attn": _flash_attn_varlen}  # best first
