"""Limits each server's concurrent requests and chooses the server for a request. Pure bookkeeping, no clocks.

A server queues requests that do not fit into its KV cache, and its queue cannot be moved to another server: so a window
per server follows its load, and requests wait here. Requests with a common prefix go to the server that has cached the
prefix, unless that server is the busier one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

_BLOCK = 64  # tokens; a prompt's cached beginning is known in such steps
_KNOWN_BLOCKS = 1 << 17
_FULL = 0.95  # share of a KV cache above which a window does not grow


@dataclass(slots=True)
class Window:
    """Requests that one server may have at once: ``size`` of at most ``ceiling``.

    The window shrinks to the number of running requests when a queue persists through two observations, and grows by an
    eighth when the window is full and the server has no queue.
    """

    ceiling: int
    size: int
    _queued: bool = False

    @classmethod
    def open(cls, ceiling: int) -> Window:
        return cls(ceiling=ceiling, size=ceiling)

    def observe(self, *, in_flight: int, running: int, waiting: int, used_share: float) -> None:
        """Adapt the window to the server's reported load; ``in_flight`` counts its admitted requests."""
        queued = waiting > max(1, running // 10)
        if queued and self._queued and running > 0:
            self.size = max(1, min(self.size, running + max(1, running // 10)))
        elif not waiting and in_flight >= self.size and used_share < _FULL:
            self.size = min(self.ceiling, self.size + max(1, self.size // 8))
        self._queued = queued


class PrefixMap:
    """Maps prefixes of token sequences to servers, by hashes of their blocks; the oldest entries are dropped."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The server that has seen the longest prefix; a prompt shorter than a block has an entry of its own."""
        found = None
        for block in _blocks(token_ids):
            if (server := self._seen.get(block)) is None:
                break
            found = server
        return found

    def note(self, token_ids: Sequence[int], server: int) -> None:
        """Note that a server computes this sequence."""
        for block in _blocks(token_ids):
            self._seen[block] = server
            self._seen.move_to_end(block)
        while len(self._seen) > _KNOWN_BLOCKS:
            self._seen.popitem(last=False)

    def forget(self, server: int) -> None:
        """Note that a server has lost its cache."""
        for block in [block for block, owner in self._seen.items() if owner == server]:
            del self._seen[block]


def choose(free: Mapping[int, tuple[int, int]], cached: int | None) -> int:
    """The server for a request, of those that have room. ``cached`` is the server that has cached its prefix.

    ``free``: server -> requests in flight, and their bound.
    """
    least = min(free, key=lambda server: free[server][0] / free[server][1])
    if cached is not None and cached in free and free[cached][0] - free[least][0] <= max(4, free[cached][1] // 4):
        return cached
    return least


def _blocks(token_ids: Sequence[int]) -> list[int]:
    tokens = np.asarray(token_ids, dtype=np.int32)
    if len(tokens) < _BLOCK:
        return [xxhash.xxh3_64_intdigest(tokens.tobytes())]
    digest = xxhash.xxh3_64()
    found = []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        digest.update(tokens[start : start + _BLOCK].tobytes())
        found.append(digest.intdigest())
    return found
