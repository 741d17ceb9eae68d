"""A stand-in for SGLang's kernel package, which has no public build for the CPU: the one kernel that SGLang calls there.

Dense models on a CPU take torch's own operators everywhere else. Missing names are objects that raise an explanation
when called, because SGLang imports some names without using them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,  # [requests]
    req_to_token: torch.Tensor,  # [pool, tokens], written
    start_offset: torch.Tensor,  # [requests]
    end_offset: torch.Tensor,  # [requests]
    out_cache_loc: torch.Tensor,  # [sum of (end - start)], request after request
    pool_len: int,
) -> None:
    """Write each request's new places in the KV cache into its row: ``req_to_token[request, start:end]``."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in rows:
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} has no stand-in on the CPU: this model or option needs a GPU build")

    return missing
