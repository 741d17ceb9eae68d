"""Makes the delta that a receiver needs: from the chain, merged from the chain's links, or coded from the base's snapshot.

    receiver at v6, wants v7   the chain's link, coded in advance
    receiver at v4, wants v7   three links, merged into one delta at the first request
    receiver at a version outside the chain, with its snapshot held: coded at the first request

``DeltaQueue`` codes the chain in advance, one link after the other; ``ReceiverDeltas`` answers requests. Requests for one
delta share its computation, in a thread that goes on when a request ends earlier. Base versions are compared by digest, so
no snapshot of the base is needed for the first two.

Independent of gRPC and of the choice of served versions: ``PublisherStore`` owns this object and its lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import structlog

from services.common.errors import BaseUnavailableError, DeadlineError
from services.common.weights.manifest import BaseVersion, Manifest, same_tensors
from services.common.weights.not_ready import (
    LONGEST_RETRY_S,
    SHORTEST_RETRY_S,
    PayloadNotReadyError,
    making_deadline_s,
)
from services.common.weights.snapshot_file import Snapshot
from services.trainer.publish.deltas import Delta, base_of
from services.trainer.publish.single_flight import SingleFlightCache

log = structlog.get_logger()

_UNKNOWN_RETRY_S = 0.25  # before the first measured delta

_Code = Callable[[Snapshot, Snapshot], Delta | None]


class Maker(Protocol):
    """Codes and merges deltas; ``DeltaMaker`` is one."""

    def encode(self, old: Snapshot, new: Snapshot) -> Delta: ...

    def merge(self, deltas: Sequence[Delta], newest: Snapshot) -> Delta: ...

    def stop(self) -> None: ...


class ReceiverDeltas:
    """The deltas of one policy, by base and version."""

    def __init__(
        self,
        maker: Maker,
        keep: int,
        lock: threading.Condition,
        *,
        on_coded: Callable[[Delta, Manifest], None],
        on_unused: Callable[[], None],
    ) -> None:
        """``on_coded`` is called with every delta that is coded from two snapshots; ``on_unused`` when a snapshot may be
        dropped. Both are called with ``lock`` held, which is reentrant."""
        self._maker = maker
        self._lock = lock
        self._on_coded = on_coded
        self._on_unused = on_unused
        self._queue = DeltaQueue(self._coded, keep, lock, on_unused)
        self._made: SingleFlightCache[_MadeDelta] = SingleFlightCache()
        self._needed: dict[tuple[BaseVersion, int], tuple[Snapshot, ...]] = {}  # leased by threads of ``_made``

    def gauges(self) -> dict[str, float]:
        """For GetStatus. With the lock held, like the next four."""
        return {
            "deltas": float(self._queue.num_links),
            "delta_bytes": float(self._queue.size_bytes + self._made.size_bytes),
            "deltas_in_progress": float(self._queue.is_coding),
            "deltas_skipped": float(self._queue.num_skipped),
        }

    def append(self, before: Snapshot, newest: Snapshot) -> None:
        """Code the delta to a new version in advance."""
        self._queue.append(before, newest)

    def bound(self, max_bytes: int) -> None:
        """Keep at most so many bytes of merged deltas."""
        self._made.max_bytes = max_bytes

    def is_made(self, base: BaseVersion, version: int) -> bool:
        """Whether a request for this delta has no coding to wait for."""
        links = self._queue.path(base, version)
        return links is not None and all(link.delta.done() for link in links)

    def needs(self, snapshot: Snapshot) -> bool:
        """Whether a delta in progress is of this snapshot."""
        used = (self._queue.used, *self._needed.values())
        return any(snapshot is one for snapshots in used for one in snapshots)

    def find(self, payload_id: str) -> Delta | None:
        """A finished delta; None when it was dropped."""
        with self._lock:
            made = [*self._queue.made(), *(kept.delta for kept in self._made if kept.delta is not None)]
        return next((delta for delta in made if delta.payload.payload_id == payload_id), None)

    def close(self) -> None:
        """Cancel coding."""
        self._queue.stop()
        self._maker.stop()
        self._queue.join()
        self._made.close()
        with self._lock:
            for key in list(self._needed):  # of deltas that were cancelled before they began
                self._not_needed(key)

    def get(self, base: BaseVersion, target: Snapshot, old: Snapshot | None, wait_s: float | None) -> Delta | None:
        """One delta from the base; None when the full snapshot is no larger. ``old``: the base's snapshot if that is held.

        Raises:
            BaseUnavailableError: no delta leads from that base, or its number has another digest.
            PayloadNotReadyError: the delta is not made after ``wait_s``.
            DeadlineError: ``wait_s`` is None, and the delta is not made after ``making_deadline_s``.
        """
        longest_s = making_deadline_s(target.manifest.size_bytes)
        until = time.monotonic() + (longest_s if wait_s is None else min(longest_s, wait_s))
        try:
            links = self._path(base, target, until)
            if links is None:
                return self._from_snapshot(base, target, old, until)
            steps = [link.wait(max(0.0, until - time.monotonic())) for link in links]
            deltas = [delta for delta in steps if delta is not None]
            if len(deltas) < len(steps):
                return None
            if len(deltas) == 1:
                return deltas[0]
            return self._once(base, target, partial(self._merged, deltas, target), until, target)
        except DeadlineError as error:
            if wait_s is None or isinstance(error, PayloadNotReadyError):
                raise
            raise self._not_ready(base, target, started=True) from None

    def _path(self, base: BaseVersion, target: Snapshot, until: float) -> list[_Link] | None:
        """The links from the base to the target, which may be in progress; None when the chain will not have them.

        While another delta is in progress, waits for the chain to reach the target.
        """
        with self._lock:
            while (links := self._queue.path(base, target.manifest.version)) is None:
                if not (self._queue.is_coding and self._queue.leads_from(base)):
                    return None
                if (remaining := until - time.monotonic()) <= 0 or not self._lock.wait(remaining):
                    raise self._not_ready(base, target, started=False)
            return links

    def _not_ready(self, base: BaseVersion, target: Snapshot, *, started: bool) -> PayloadNotReadyError:
        with self._lock:
            retry_after_s = self._queue.retry_after_s(target.manifest.size_bytes)
        name = f"the delta from version {base.number} to {target.manifest.version}"
        return PayloadNotReadyError(name, retry_after_s, started=started, size_bytes=target.manifest.size_bytes)

    def _from_snapshot(self, base: BaseVersion, target: Snapshot, old: Snapshot | None, until: float) -> Delta | None:
        if old is not None and base_of(old.manifest) == base:
            return self._once(base, target, partial(self._coded, old, target), until, old, target)
        unavailable = BaseUnavailableError(
            f"no delta leads here from version {base.number} with digest {base.digest}; ask for the full snapshot"
        )
        if (base, target.manifest.version) not in self._made:
            raise unavailable

        def dropped() -> Delta | None:  # the delta left the cache after the check, and its base is not held
            raise unavailable

        return self._once(base, target, dropped, until, target)

    def _once(
        self, base: BaseVersion, target: Snapshot, make: Callable[[], Delta | None], until: float, *needed: Snapshot
    ) -> Delta | None:
        """Make the delta in a thread, once. The thread holds the needed snapshots: it may outlive this request."""
        key = base, target.manifest.version
        with self._lock:
            if key not in self._made and key not in self._needed:
                for snapshot in needed:
                    snapshot.lease()
                self._needed[key] = needed

        def made() -> _MadeDelta:
            try:
                return _MadeDelta(make())
            finally:
                self._not_needed(key)

        wait = f"the delta from version {base.number} to {key[1]}"
        return self._made.get(key, made, wait, max(0.0, until - time.monotonic())).delta

    def _not_needed(self, key: tuple[BaseVersion, int]) -> None:
        with self._lock:
            for snapshot in self._needed.pop(key, ()):
                snapshot.release()
            self._on_unused()

    def _coded(self, old: Snapshot, new: Snapshot) -> Delta | None:
        if not same_tensors(old.manifest.tensors, new.manifest.tensors):
            return None
        delta = self._maker.encode(old, new)
        with self._lock:
            self._on_coded(delta, new.manifest)
        return _if_smaller(delta, new.manifest, num_merged=1)

    def _merged(self, deltas: list[Delta], target: Snapshot) -> Delta | None:
        return _if_smaller(self._maker.merge(deltas, target), target.manifest, num_merged=len(deltas))


@dataclass(frozen=True, slots=True)
class _MadeDelta:
    """The result of a request for a delta; None when the full snapshot is no larger."""

    delta: Delta | None

    @property
    def size_bytes(self) -> int:
        return self.delta.size_bytes if self.delta is not None else 0


def _if_smaller(delta: Delta, target: Manifest, *, num_merged: int) -> Delta | None:
    """The delta; None when the full snapshot is no larger."""
    log.info(
        "delta.made",
        payload=delta.payload.payload_id,
        size_bytes=delta.size_bytes,
        full_bytes=target.size_bytes,
        num_merged=num_merged,
        seconds=round(delta.payload.encode_s, 3),
    )
    return delta if delta.size_bytes < target.size_bytes else None


@dataclass(frozen=True, slots=True)
class _Link:
    """The delta between two consecutive versions. The future gives None when the full snapshot is no larger."""

    base: BaseVersion
    target: BaseVersion
    delta: Future[Delta | None]

    @property
    def made(self) -> Delta | None:
        """The finished delta; None before its end, and after a failure."""
        future = self.delta
        if not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def wait(self, timeout_s: float) -> Delta | None:
        """Wait for the delta and return the result of its future.

        Raises:
            DeadlineError: the delta is not finished after ``timeout_s``.
        """
        try:
            return self.delta.result(timeout_s)
        except TimeoutError:
            wait = f"the delta from version {self.base.number} to {self.target.number}"
            raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait) from None


class DeltaQueue:
    """The chain of deltas between consecutive versions, and the thread that extends the chain.

        v6 -> v7 is being coded | v8, v9, v10 are announced | v7 -> v10 is coded next

    Versions are skipped while coding is slower than publishing. One delta at a time: two at once would share the same cores.
    At most one version waits, the newest: receivers fetch only the newest version, so a delta to an older one would be coded
    for no receiver. So coding holds at most three snapshots, however far it lags.

    All methods except ``stop`` and ``join`` are called with the lock ``changed`` held; ``changed`` is notified when a delta is
    begun or finished. A snapshot is leased while a delta needs it.
    """

    def __init__(self, code: _Code, keep: int, changed: threading.Condition, on_unused: Callable[[], None]) -> None:
        """``code`` codes the delta of two snapshots, None when the full snapshot is no larger; ``keep`` bounds
        the chain; ``on_unused`` is called when a snapshot is no longer needed."""
        self.num_skipped = 0
        self.used: tuple[Snapshot, ...] = ()  # base and target of the delta in progress
        self._code = code
        self._keep = keep
        self._changed = changed
        self._on_unused = on_unused
        self._coder = ThreadPoolExecutor(1, "publisher.eager")
        self._links: deque[_Link] = deque()  # oldest first
        self._waiting: Snapshot | None = None
        self._is_closed = False
        self._began = 0.0
        self._seconds_per_byte = 0.0

    @property
    def is_coding(self) -> bool:
        return bool(self.used)

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def size_bytes(self) -> int:
        return sum(delta.size_bytes for delta in self.made())

    def made(self) -> list[Delta]:
        """The finished deltas."""
        return [made for link in self._links if (made := link.made) is not None]

    def append(self, before: Snapshot, newest: Snapshot) -> None:
        """Code the delta to ``newest``: from ``before`` at once, or from the delta in progress when that is finished."""
        newest.lease()
        if not self.is_coding:
            before.lease()
            self._begin(before, newest)
            return
        if self._waiting is not None:
            self.num_skipped += 1
            log.info("delta.skipped", version=self._waiting.manifest.version, newest=newest.manifest.version)
            self._waiting.release()
        self._waiting = newest

    def path(self, base: BaseVersion, version: int) -> list[_Link] | None:
        """The links from ``base`` to ``version``; None when one of them is not kept.

        Raises:
            BaseUnavailableError: the base's number has another digest in the chain.
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
        for link in islice(self._links, begin, None):
            found.append(link)
            if link.target.number == version:
                return found
        return None

    def leads_from(self, base: BaseVersion) -> bool:
        """Whether the chain begins, ends or has a link at ``base``."""
        return any(base in (link.base, link.target) for link in self._links)

    def retry_after_s(self, size_bytes: int) -> float:
        """When to ask again for a delta of a version of ``size_bytes``: by the measured speed of coding."""
        if not self._seconds_per_byte:
            return _UNKNOWN_RETRY_S
        remaining = size_bytes * self._seconds_per_byte - (time.monotonic() - self._began)
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, remaining))

    def stop(self) -> None:
        """Begin no other delta. Called without the lock."""
        with self._changed:
            self._is_closed = True
        self._coder.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the delta in progress. Called without the lock."""
        self._coder.shutdown(wait=True)

    def _begin(self, old: Snapshot, new: Snapshot) -> None:
        """Start a delta of two leased snapshots. A base that is not the end of the chain starts a new chain."""
        self.used = (old, new)
        self._began = time.monotonic()
        future = self._coder.submit(self._code, old, new)
        link = _Link(base_of(old.manifest), base_of(new.manifest), future)
        if self._links and self._links[-1].target != link.base:
            self._links.clear()
        self._links.append(link)
        while len(self._links) > self._keep:
            self._links.popleft()
        future.add_done_callback(lambda done: self._finished(done, old, new))
        self._changed.notify_all()

    def _finished(self, future: Future[Delta | None], old: Snapshot, new: Snapshot) -> None:
        with self._changed:
            self.used = ()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("delta.not_made", version=new.manifest.version, error=str(error))
            else:
                self._seconds_per_byte = (time.monotonic() - self._began) / max(1, new.manifest.size_bytes)
            while self._links and self.size_bytes > new.manifest.size_bytes:
                self._links.popleft()
            waiting, self._waiting = self._waiting, None
            if waiting is not None and not self._is_closed:
                self._begin(new, waiting)
            else:
                for unused in (new, waiting):
                    if unused is not None:
                        unused.release()
            old.release()
            self._on_unused()
            self._changed.notify_all()
