"""Attention of a decoding step, one query position per row, in two forms that torch's own function does not have.

``query`` is [rows, kv heads, heads per kv head, dim]; keys and values are [rows, kv heads, positions, dim].
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

WIDEST_JOINT = 64  # elements of a token's keys up to which ``JointHeads`` is faster, measured on one core


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


class JointHeads:
    """Attention over the key heads of a token as one head. A query head has zeros at the dimensions of other key heads, so
    the scores stay. Of small heads the products cost more by their number than by their size; this makes them fewer.
    """

    def __init__(self, num_slots: int, kv_heads: int, per_head: int, dim: int) -> None:
        self._query = torch.zeros(num_slots, kv_heads, per_head, kv_heads, dim)  # beside its diagonal it stays zero

    def attend(self, query: torch.Tensor, own: Pair, mask: torch.Tensor) -> torch.Tensor:
        """``mask`` is [rows, 1, 1, positions]. Returns [rows, heads * dim]."""
        rows, kv_heads, per_head, dim = query.shape
        wide = self._query[:rows]
        torch.mul(query.permute(0, 2, 3, 1), dim**-0.5, out=wide.diagonal(dim1=1, dim2=3))
        keys, values = (part.transpose(1, 2).flatten(2) for part in own)  # [rows, positions, kv heads * dim]
        scores = torch.baddbmm(mask[:, 0], wide.view(rows, kv_heads * per_head, -1), keys.transpose(1, 2))
        found = torch.bmm(scores.softmax(dim=-1), values).view(wide.shape)
        return found.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(rows, kv_heads * per_head * dim)
