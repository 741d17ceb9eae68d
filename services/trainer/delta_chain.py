"""The deltas between consecutive versions that a publisher keeps, and the digest of every version that they connect.

    v3 --delta--> v4 --delta--> v5 --delta--> v6        a receiver at v3 takes three, merged into one

A delta may still be in the making. Knows nothing about snapshots, or about how deltas are made.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from services.common.errors import BaseUnavailableError, DeadlineError
from services.common.weights.manifest import BaseVersion
from services.trainer.delta import Delta


@dataclass(frozen=True, slots=True)
class Link:
    """The delta between two consecutive versions; its future gives None when the full snapshot is no larger."""

    base: BaseVersion
    target: BaseVersion
    delta: Future[Delta | None]

    @property
    def made(self) -> Delta | None:
        """None as long as it is not."""
        future = self.delta
        if not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def wait(self, timeout_s: float) -> Delta | None:
        """``DeadlineError`` when it is still being made after that time; else what became of it."""
        try:
            return self.delta.result(timeout_s)
        except TimeoutError:
            wait = f"the delta from version {self.base.number} to {self.target.number}"
            raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait) from None


class DeltaChain:
    """The newest links, oldest first. The caller keeps it from being used by two threads at once."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._links: deque[Link] = deque()

    def append(self, base: BaseVersion, target: BaseVersion, delta: Future[Delta | None]) -> None:
        """What leads to the newest version. A base that is not the end of the chain begins it anew."""
        if self._links and self._links[-1].target != base:
            self._links.clear()
        self._links.append(Link(base, target, delta))
        while len(self._links) > self._keep:
            self._links.popleft()

    def bound(self, max_bytes: int) -> None:
        """Drop the oldest until the deltas that are made have at most so many bytes in all."""
        while self._links and self.size_bytes > max_bytes:
            self._links.popleft()

    def path(self, base: BaseVersion, version: int) -> list[Link] | None:
        """The links from one version to another; None when they are not all kept.

        Raises:
            BaseUnavailableError: the chain knows the base's number with another digest.
        """
        numbers = [link.base.number for link in self._links]
        if base.number not in numbers:
            return None
        begin = numbers.index(base.number)
        if self._links[begin].base != base:
            raise BaseUnavailableError(
                f"version {base.number} has digest {self._links[begin].base.digest} here, not {base.digest}; "
                "ask for the full snapshot"
            )
        found = []
        for link in list(self._links)[begin:]:
            found.append(link)
            if link.target.number == version:
                return found
        return None

    def made(self) -> list[Delta]:
        """The deltas that are made."""
        return [made for link in self._links if (made := link.made) is not None]

    @property
    def size_bytes(self) -> int:
        return sum(delta.size_bytes for delta in self.made())

    def __len__(self) -> int:
        return len(self._links)
