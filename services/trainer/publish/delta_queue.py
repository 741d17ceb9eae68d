"""Codes the deltas of the chain one after the other, and skips versions while coding is slower than publishing.

    v6 -> v7 is being coded | v8, v9, v10 are announced | v7 -> v10 is coded next

One delta at a time: two at once would share the same cores. At most one version waits, the newest: receivers fetch only
the newest version, so a delta to an older one would be coded for no receiver. So coding holds at most three snapshots,
however far it lags.

Independent of requests; ``PublisherStore`` owns it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from services.common.weights.manifest import BaseVersion
from services.common.weights.not_ready import LONGEST_RETRY_S, SHORTEST_RETRY_S
from services.common.weights.snapshot_file import Snapshot
from services.trainer.publish.deltas import Delta, DeltaChain, base_of

log = structlog.get_logger()

_UNKNOWN_RETRY_S = 0.25  # before the first measured delta

Code = Callable[[Snapshot, Snapshot], Delta | None]


class DeltaQueue:
    """The chain of deltas and the thread that extends it.

    All methods except ``stop`` and ``join`` are called with the lock ``changed`` held; ``changed`` is notified when a delta is begun
    or finished. A snapshot is leased while a delta needs it.
    """

    def __init__(self, code: Code, keep: int, changed: threading.Condition, on_unused: Callable[[], None]) -> None:
        """``code`` codes the delta of two snapshots, None when the full snapshot is no larger; ``keep`` bounds
        the chain; ``on_unused`` is called when a snapshot is no longer needed."""
        self.chain = DeltaChain(keep)
        self.num_skipped = 0
        self._code = code
        self._changed = changed
        self._on_unused = on_unused
        self._coder = ThreadPoolExecutor(1, "publisher.eager")
        self._waiting: Snapshot | None = None
        self.used: tuple[Snapshot, ...] = ()  # base and target of the delta in progress
        self._is_closed = False
        self._began = 0.0
        self._seconds_per_byte = 0.0

    @property
    def is_coding(self) -> bool:
        return bool(self.used)

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

    def leads_from(self, base: BaseVersion) -> bool:
        """Whether the chain begins, ends or has a link at ``base``."""
        return any(base in (link.base, link.target) for link in self.chain.links())

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
        """Start a delta of two leased snapshots."""
        self.used = (old, new)
        self._began = time.monotonic()
        future = self._coder.submit(self._code, old, new)
        self.chain.append(base_of(old.manifest), base_of(new.manifest), future)
        future.add_done_callback(lambda done: self._finished(done, old, new))
        self._changed.notify_all()

    def _finished(self, future: Future[Delta | None], old: Snapshot, new: Snapshot) -> None:
        with self._changed:
            self.used = ()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("delta.not_made", version=new.manifest.version, error=str(error))
            else:
                self._seconds_per_byte = (time.monotonic() - self._began) / max(1, new.manifest.size_bytes)
            self.chain.bound(new.manifest.size_bytes)
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
