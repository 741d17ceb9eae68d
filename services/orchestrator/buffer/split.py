"""How a batch is cut: into minibatches by a rule that knows no ranks, then each minibatch into rank shares.

Both cuts place sequences in decreasing length, each into the bin with the fewest tokens so far (first such bin). That
balances tokens, and spreads long and short sequences over all bins; filling one bin after another would train all the
long ones in the first minibatch. Pure functions of token counts: every rank, and every repetition, gets the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def spread(num_tokens: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each sequence.

    >>> spread([5, 9, 4, 8], 2)
    [1, 0, 0, 1]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; it must be 1 or more")
    # Count before index, so that sequences of no tokens spread as well. An empty bin goes first, so no more are ever used
    # than there are sequences, however many a caller claims to have.
    bins = [(0, 0, index) for index in range(min(num_bins, max(1, len(num_tokens))))]
    result = [0] * len(num_tokens)
    for position in sorted(range(len(num_tokens)), key=lambda p: (-num_tokens[p], p)):
        tokens, count, index = bins[0]
        heapq.heapreplace(bins, (tokens + num_tokens[position], count + 1, index))
        result[position] = index
    return result


def rank_share(num_tokens: Sequence[int], minibatch_of: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Which sequences of the batch one rank trains: its bin of every minibatch, in batch order.

    Over all ranks every sequence appears exactly once.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}; it must be at least 0 and less than num_ranks ({num_ranks})")
    share: list[int] = []
    for minibatch in range(max(minibatch_of, default=-1) + 1):
        positions = [p for p, m in enumerate(minibatch_of) if m == minibatch]
        ranks = spread([num_tokens[p] for p in positions], num_ranks)
        share.extend(p for p, r in zip(positions, ranks, strict=True) if r == rank)
    return sorted(share)
