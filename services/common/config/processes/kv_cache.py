"""The sizes of an embedded engine's KV cache, for the engine and for `rollmill check`."""

from __future__ import annotations

BLOCK_TOKENS = 32
"""Positions of a block. On average a row leaves half of its last block empty; a gather of larger blocks is faster."""
RESERVED_BLOCKS = 2  # one of zeros, one for the values of padding


def blocks_of(num_positions: int) -> int:
    return -(-num_positions // BLOCK_TOKENS)


def least_blocks(context_length: int) -> int:
    """Blocks with which one sequence can reach the end of the context: then every request ends, one after another."""
    return blocks_of(context_length) + RESERVED_BLOCKS


def cache_bytes(limit_bytes: float, num_slots: int, context_length: int, token_bytes: int) -> int:
    """Bytes of the cache: as many as all slots can fill, at most ``limit_bytes``. ``token_bytes``: over all layers."""
    return int(min(limit_bytes, num_slots * context_length * token_bytes))


def too_small(limit_bytes: float, context_length: int, token_bytes: int) -> str | None:
    """The sentence that refuses a limit under which no sequence could reach the end of the context; None if it fits."""
    needed = least_blocks(context_length) * BLOCK_TOKENS * token_bytes
    if needed <= limit_bytes:
        return None
    return (
        f"kv_cache_gib is {limit_bytes / (1 << 30):.3g}, and one sequence of {context_length} tokens needs "
        f"{needed / (1 << 30):.3g}: raise kv_cache_gib to at least {needed * 1.0005 / (1 << 30):.3g}, or lower "
        "policies.*.model.context_length"
    )
