"""Finds common beginnings of documents, so that a packed row holds each of them once.

The hidden state of a token depends only on the preceding tokens: not on their sampler, their temperature or their mask.
So two documents have the same states as far as their token ids agree. Sorted by token ids, each document has its longest
common beginning with the previous one, and the row is the documents' tree in preorder.

Plain numpy, independent of masks, budgets and models.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# A document joins a family only if at least this share of its tokens is common. Below this share, attention over the rows
# of another document costs more than the saved rows.
WORTHWHILE = 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """A document, and the number of its first tokens that the previous document of the family has too."""

    index: int
    length: int
    shared: int  # 0 for the first of a family

    @property
    def own(self) -> int:
        return self.length - self.shared


Family = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive rows of one document, and the earlier rows of the same document."""

    start: int
    length: int
    prefix: Ints  # [positions before the branch] rows, ascending

    @property
    def end(self) -> int:
        return self.start + self.length


def families(token_ids: Seq[npt.NDArray[np.int32]], max_tokens: int) -> list[Family]:
    """Group documents with a common beginning into families of at most ``max_tokens`` distinct tokens, or one document.

    Documents without tokens are in no family. Families come in the order of their smallest index.

    >>> a, b, c = np.array([1, 2, 3]), np.array([7, 8]), np.array([1, 2, 4, 5])
    >>> [[(m.index, m.shared) for m in family] for family in families([a, b, c], 10)]
    [[(0, 0), (2, 2)], [(1, 0)]]
    >>> [[(m.index, m.shared) for m in family] for family in families([a, b, c], 4)]
    [[(0, 0)], [(1, 0)], [(2, 0)]]
    """
    # Big-endian, so that bytes sort like the ids; a document comes before its continuations.
    keys = [np.ascontiguousarray(ids, dtype=">u4").tobytes() for ids in token_ids]
    found: list[list[Member]] = []
    num_tokens = 0  # distinct ones of the newest family
    previous = b""
    for index in sorted((i for i, key in enumerate(keys) if key), key=keys.__getitem__):
        length = len(keys[index]) // 4
        shared = _num_shared(previous, keys[index])
        previous = keys[index]
        if shared < WORTHWHILE * length or num_tokens + length - shared > max_tokens:
            shared = num_tokens = 0
            found.append([])
        num_tokens += length - shared
        found[-1].append(Member(index, length, shared))
    return sorted((tuple(family) for family in found), key=lambda family: min(m.index for m in family))


def num_distinct(family: Family) -> int:
    """Number of rows of the family."""
    return sum(member.own for member in family)


def lay_out(placed: Seq[Family]) -> tuple[list[Branch], dict[int, Ints]]:
    """The branches of the families one after another, and for each document the rows of its tokens, in order."""
    branches: list[Branch] = []
    paths: dict[int, Ints] = {}
    end = 0
    for family in placed:
        path = np.zeros(0, dtype=np.int64)
        for member in family:
            prefix = path[: member.shared]
            if member.own:
                branches.append(Branch(end, member.own, prefix))
                path = np.concatenate([prefix, np.arange(end, end + member.own, dtype=np.int64)])
                end += member.own
            else:
                path = prefix
            paths[member.index] = path
    return branches, paths


def _num_shared(first: bytes, second: bytes) -> int:
    """Length of the common beginning of two documents, in tokens."""
    length = min(len(first), len(second)) // 4
    differ = np.frombuffer(first, dtype=np.uint32, count=length) != np.frombuffer(second, dtype=np.uint32, count=length)
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
