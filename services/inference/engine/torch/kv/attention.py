"""Attention of a decoding step, one query position per row, in a form that torch's own function does not have.

``query`` is [rows, kv heads, heads per kv head, dim]; keys and values are [rows, kv heads, positions, dim].
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def attend_to_trunk(query: torch.Tensor, trunk: Pair, own: Pair, mask: torch.Tensor) -> torch.Tensor:
    """Attention of ``query`` to keys and values that all rows have in common, read once as one matrix, and to each row's
    own: one softmax over both. As in Juravsky et al. 2024, "Hydragen".

    ``trunk``: [1, kv heads, positions, dim]; ``own`` is under ``mask``. Returns the shape of ``query``.
    """
    rows, kv_heads, per_head, dim = query.shape
    (far_keys, far_values), (keys, values) = trunk, own
    width = far_keys.shape[2]
    query = query * dim**-0.5
    far = torch.matmul(query.transpose(0, 1).reshape(kv_heads, rows * per_head, dim), far_keys[0].transpose(1, 2))
    near = torch.matmul(query, keys.transpose(2, 3)).add_(mask)
    scores = torch.cat([far.view(kv_heads, rows, per_head, width), near.transpose(0, 1)], dim=-1).softmax(dim=-1)
    far = torch.matmul(scores[..., :width].reshape(kv_heads, rows * per_head, width), far_values[0])
    return far.view(kv_heads, rows, per_head, dim).transpose(0, 1) + torch.matmul(
        scores[..., width:].transpose(0, 1), values
    )
