"""Describes the documents and the targets of a packed row, and divides the documents into few calls of attention.

A row is a sequence of branches. A branch without a prefix is a whole document, or the beginning of several; a branch with
a prefix continues rows of earlier branches. A token sees the prefix of its branch, and its branch up to its own place.

* ``runs``: the branches at the beginning of the row that share no rows with others, neighbours of equal length together
* ``blocks``: the rest. Consecutive branches of up to ``BLOCK_ROWS`` rows are the queries of one block; its keys are the
  prefix of the first of them and the same rows. Blocks of similar sizes are padded to one batch. The masked part of a
  small block takes less time than the start of another call.

Arithmetic of indices in numpy, independent of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from services.trainer.data.packing import Branch

Ints = npt.NDArray[np.int64]

BLOCK_ROWS = 64
_PADDED_ROWS = 16
_PADDED_PAIRS = 1 << 16  # blocks with more (query, key) pairs are not padded


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Blocks of similar sizes, padded to the largest."""

    num_blocks: int
    num_queries: int  # of each
    num_keys: int
    mask: (
        torch.Tensor | None
    )  # [num_blocks, 1, num_queries, num_keys] bool: whether the query sees the key; None: causal


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All blocks of a row. Padding repeats a row of the block: results of padding queries are unused, their keys masked."""

    batches: tuple[BlockBatch, ...]
    query_rows: torch.Tensor  # [blocks * queries, of one batch after another]
    key_rows: torch.Tensor  # [blocks * keys, likewise]
    places: torch.Tensor  # [rows behind the runs]: where each is in query_rows


class Documents:
    """The documents of a row. Immutable; arguments of kernels are computed at their first use and kept."""

    def __init__(self, branches: Seq[Branch], device: torch.device | str = "cpu") -> None:
        self.branches = tuple(branches)
        self._device = device
        has_parts = [bool(len(after.prefix)) for after in self.branches[1:]] + [False]
        is_part = [bool(len(branch.prefix)) for branch in self.branches]
        shares = [one or other for one, other in zip(is_part, has_parts, strict=True)]
        self._num_alone = shares.index(True) if any(shares) else len(shares)
        self.max_length = max((len(b.prefix) + b.length for b in self.branches), default=0)  # of a document
        self.max_branch = max((b.length for b in self.branches), default=0)
        # Number of pairs (token, visible token), the token itself included.
        self.num_pairs = sum(b.length * len(b.prefix) + b.length * (b.length + 1) // 2 for b in self.branches)

    @classmethod
    def from_offsets(cls, offsets: Ints, device: torch.device | str = "cpu") -> Documents:
        """Documents without shared rows: document i is offsets[i]:offsets[i + 1].

        >>> Documents.from_offsets(np.array([0, 3, 6, 8])).runs
        ((2, 3), (1, 2))
        """
        starts, nothing = [int(offset) for offset in offsets], np.zeros(0, dtype=np.int64)
        pairs = itertools.pairwise(starts)
        return cls([Branch(start, end - start, nothing) for start, end in pairs], device)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(number of branches, their length)"""
        runs: list[tuple[int, int]] = []
        for branch in self.branches[: self._num_alone]:
            if runs and runs[-1][1] == branch.length:
                runs[-1] = (runs[-1][0] + 1, branch.length)
            else:
                runs.append((1, branch.length))
        return tuple(runs)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Bounds of the branches: branch i is offsets[i]:offsets[i + 1]. [num_branches + 1] int32"""
        return self._cumulative([b.length for b in self.branches])

    @cached_property
    def key_rows(self) -> torch.Tensor | None:
        """The prefix and the rows of each branch, end to end; None when they are the row itself."""
        if not any(len(b.prefix) for b in self.branches):
            return None
        rows = np.concatenate([_keys(b.prefix, b.start, b.end) for b in self.branches])
        return torch.from_numpy(rows).to(self._device)

    @cached_property
    def key_offsets(self) -> torch.Tensor:
        """Branch i sees key_rows[key_offsets[i]:key_offsets[i + 1]]. [num_branches + 1] int32"""
        return self._cumulative([len(b.prefix) + b.length for b in self.branches])

    @cached_property
    def blocks(self) -> Blocks | None:
        """The blocks of the row; None when the row has only runs."""
        units = _units(self.branches[self._num_alone :])
        if not units:
            return None
        groups = _alike(units)
        ends = _ends(self.branches)
        first = units[0].start
        query_rows, key_rows, batches = [], [], []
        places = np.zeros(len(ends) - first, dtype=np.int64)
        begin = 0
        for group in groups:
            num_queries, num_keys = max(u.num_rows for u in group), max(len(u.keys) for u in group)
            queries = np.stack([_padded(np.arange(u.start, u.end), num_queries) for u in group])
            keys = np.stack([_padded(u.keys, num_keys) for u in group])
            real = np.arange(num_keys) < np.array([len(u.keys) for u in group])[:, None]
            # A query sees a key if the query lies in the key's subtree, which is a range of rows.
            seen = (keys[:, None] <= queries[..., None]) & (queries[..., None] < ends[keys][:, None]) & real[:, None]
            # The mask of a long branch without prefix is causal: the kernel needs no mask and computes half of it.
            is_causal = num_queries == num_keys and bool((seen == np.tri(num_queries, dtype=np.bool_)).all())
            mask = None if is_causal else torch.from_numpy(seen[:, None]).to(self._device)
            batches.append(BlockBatch(len(group), num_queries, num_keys, mask))
            for unit in group:
                places[unit.start - first : unit.end - first] = np.arange(begin, begin + unit.num_rows)
                begin += num_queries
            query_rows.append(queries.ravel())
            key_rows.append(keys.ravel())
        return Blocks(
            batches=tuple(batches),
            query_rows=torch.from_numpy(np.concatenate(query_rows)).to(self._device),
            key_rows=torch.from_numpy(np.concatenate(key_rows)).to(self._device),
            places=torch.from_numpy(places).to(self._device),
        )

    def _cumulative(self, lengths: Seq[int]) -> torch.Tensor:
        return torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=self._device)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One block, with the queries start:end."""

    start: int
    end: int
    keys: Ints

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def _keys(prefix: Ints, start: int, end: int) -> Ints:
    return np.concatenate([prefix, np.arange(start, end, dtype=np.int64)])


def _units(branches: Seq[Branch]) -> list[_Unit]:
    """The blocks: consecutive branches of up to ``BLOCK_ROWS`` rows together, a longer branch alone."""
    cuts: list[tuple[Branch, int]] = []  # the first branch of a unit, and where the unit ends
    for branch in branches:
        if cuts and branch.end - cuts[-1][0].start <= BLOCK_ROWS:
            cuts[-1] = (cuts[-1][0], branch.end)
        else:
            cuts.append((branch, branch.end))
    return [_Unit(first.start, end, _keys(first.prefix, first.start, end)) for first, end in cuts]


def _alike(units: Seq[_Unit]) -> list[list[_Unit]]:
    """Groups of units such that none is padded by ``_PADDED_ROWS`` or more."""
    groups: dict[tuple[int, int], list[_Unit]] = {}
    for unit in units:
        size = (unit.num_rows, len(unit.keys))
        if size[0] * size[1] <= _PADDED_PAIRS:
            size = (-(-size[0] // _PADDED_ROWS), -(-size[1] // _PADDED_ROWS))
        groups.setdefault(size, []).append(unit)
    return list(groups.values())


def _ends(branches: Seq[Branch]) -> Ints:
    """The end of the range of rows that see each row. [num_rows]"""
    ends = np.empty(branches[-1].end, dtype=np.int64)
    path = np.zeros(0, dtype=np.int64)
    for branch in branches:
        ends[path[len(branch.prefix) :]] = branch.start
        path = _keys(branch.prefix, branch.start, branch.end)
    ends[path] = branches[-1].end
    return ends


def _padded(rows: Ints, length: int) -> Ints:
    return np.concatenate([rows, np.full(length - len(rows), rows[0])])


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Pairs of a hidden state and the next token. A pair that occurs in several documents is scored once."""

    predecessors: torch.Tensor  # [num_distinct] rows of the packed row
    token_ids: torch.Tensor  # [num_distinct]
    copies: torch.Tensor | None = None  # [num_targets] in [0, num_distinct); None: each pair is one target

    @property
    def num_targets(self) -> int:
        return len(self.predecessors if self.copies is None else self.copies)

    @property
    def num_distinct(self) -> int:
        return len(self.predecessors)

    @classmethod
    def of(cls, predecessors: Ints, token_ids: Ints, device: torch.device | str, *, distinct: bool) -> Targets:
        """Build the pairs. ``distinct``: score equal pairs once, which requires one sampling distribution."""
        copies = None
        if distinct and len(predecessors):
            pairs = predecessors * (int(token_ids.max()) + 1) + token_ids
            _, first, found = np.unique(pairs, return_index=True, return_inverse=True)
            if len(first) < len(pairs):
                predecessors, token_ids = predecessors[first], token_ids[first]
                copies = torch.as_tensor(found, device=device)
        return cls(torch.as_tensor(predecessors, device=device), torch.as_tensor(token_ids, device=device), copies)

    @classmethod
    def at(cls, positions: torch.Tensor, token_ids: torch.Tensor) -> Targets:
        """Targets at positions of a row without shared tokens; no position may be the first of its document."""
        return cls(positions - 1, token_ids.index_select(0, positions))

    def each(self, scores: torch.Tensor) -> torch.Tensor:
        """Expand scores of pairs to targets. [num_distinct] -> [num_targets]"""
        return scores if self.copies is None else scores.index_select(0, self.copies)
