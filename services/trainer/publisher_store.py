"""What a publisher can serve: the last snapshots, and one delta from any version that a receiver may hold to any of them.

    add(v7) --> encode v6->v7 (in a thread) --> chain of the last deltas --> merged for who is at v4, made once, kept

A version's predecessor is coded before anybody asks, in the fast profile. What receivers need beyond that (several
versions in one delta, the small profile) is made when the first one asks; the others wait for it, and nobody else does.
Neither needs the base's snapshot: its digest in the chain is enough to know that a receiver holds the right one.

A ``PayloadSource``. Knows nothing about gRPC. What is read is leased, so that nothing is removed under a reader.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from services.common.config.policy import WeightsConfig
from services.common.errors import BaseUnavailableError, NotFoundError, VersionConflictError, VersionUnavailableError
from services.common.transfer.source import MemoryReader, PayloadReader, PayloadRequest
from services.common.weights.manifest import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    Profile,
    full_payload_id,
    same_tensors,
)
from services.common.weights.snapshot_file import Snapshot
from services.trainer.delta import Delta, DeltaMaker, base_of
from services.trainer.delta_chain import DeltaChain
from services.trainer.made_once import MadeOnce

log = structlog.get_logger()

MOST_THREADS = 4  # two code 1.6 times as fast as one, four 1.9 times: the interpreter lock takes the rest
ENCODE_TIMEOUT_S = 120.0  # the longest that one receiver waits for a delta that is being made for another

# Where both profiles cost a receiver the same, per byte of bf16 weights of which 1% changed: the small one saves about
# 2.5 bits per change on the link, and takes longer to decode (``benchmarks/weights_codec.py``, one core). Coding is not
# counted, because it is done once for all receivers.
_SAVED_BYTES = 0.01 / 2 * (10.5 - 8.0) / 8
_LONGER_S = 1 / 1.3e9 - 1 / 9e9
SMALL_BELOW_BYTES_PER_S = _SAVED_BYTES / _LONGER_S  # 2.4 MB/s


class PublisherStore:
    """The versions of one policy of one run. ``add`` is for one thread, everything else for any."""

    def __init__(self, run_id: str, policy: str, config: WeightsConfig, *, num_threads: int | None = None) -> None:
        self._run_id = run_id
        self._policy = policy
        self._config = config
        # Never held while something is made. Reentrant: the callback of a delta may run in the thread that holds it.
        self._lock = threading.RLock()
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._chain = DeltaChain(config.keep_deltas)
        self._made: MadeOnce[_Made] = MadeOnce()
        self._maker = DeltaMaker(num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0))))
        self._eager = ThreadPoolExecutor(1, "publisher.eager")  # one: deltas are needed in the order of versions

    @property
    def newest(self) -> int:
        """The newest version held; -1 when none is."""
        return next(reversed(self._snapshots), -1)

    def gauges(self) -> dict[str, float]:
        """For GetStatus."""
        with self._lock:
            return {
                "newest_version": float(self.newest),
                "snapshots": float(len(self._snapshots)),
                "deltas": float(len(self._chain)),
                "delta_bytes": float(self._chain.size_bytes + self._made.size_bytes),
            }

    def add(self, path: Path) -> Manifest:
        """Serve a sealed snapshot, and begin to code what changed since the one before.

        Adding the same again is harmless.

        Raises:
            VersionConflictError: its number is served with another digest.
            CorruptDataError, OSError: it is no snapshot.
        """
        snapshot = Snapshot(path)
        manifest = snapshot.manifest
        with self._lock:
            known = self._snapshots.get(manifest.version)
            if known is not None:
                snapshot.close()
                if known.manifest.digest != manifest.digest:
                    raise VersionConflictError(
                        f"version {manifest.version} is served with digest {known.manifest.digest}, "
                        f"not {manifest.digest}"
                    )
                return manifest
            before = next(reversed(self._snapshots.values()), None)
            self._snapshots[manifest.version] = snapshot
            if before is not None and self._config.transfer == "delta" and self._config.keep_deltas:
                self._encode_eagerly(before, snapshot)
            self._made.max_bytes = manifest.size_bytes
            while len(self._snapshots) > self._config.keep_versions:
                _, oldest = self._snapshots.popitem(last=False)
                oldest.retire()
        return manifest

    def payload(self, request: PayloadRequest) -> Payload:
        """What to fetch to hold a version: one delta from the base when that is smaller, else the snapshot.

        Raises:
            VersionUnavailableError: another run's, or a version that is not held.
            BaseUnavailableError: nothing leads from that base, or its number has another digest; ask without one.
            DeadlineError: the delta is being made and takes too long.
        """
        with self._leased(request) as snapshot:
            full = Payload(
                payload_id=full_payload_id(snapshot.manifest),
                encoding=Encoding.FULL,
                size_bytes=snapshot.manifest.size_bytes,
                target=snapshot.manifest,
            )
            base, every = request.base, self._config.full_every
            if base is None or self._config.transfer == "full" or (every and request.version % every == 0):
                return full
            delta = self._delta(base, snapshot, self._profile(request))
            return delta.payload if delta is not None else full

    def open(self, payload_id: str) -> PayloadReader:
        """The bytes of a payload, leased. ``NotFoundError`` when it is gone: ask for the manifest again."""
        with self._lock:
            for snapshot in self._snapshots.values():
                if full_payload_id(snapshot.manifest) == payload_id:
                    snapshot.lease()
                    data = snapshot.data[: snapshot.manifest.size_bytes]
                    return MemoryReader(data, partial(self._release, snapshot), (snapshot.path, snapshot.data_offset))
            made = [*self._chain.made(), *(kept.delta for kept in self._made if kept.delta is not None)]
        delta = next((delta for delta in made if delta.payload.payload_id == payload_id), None)
        if delta is None:
            raise NotFoundError(f"payload {payload_id!r} is gone: ask for the manifest again")
        return MemoryReader(memoryview(delta.data))

    def close(self) -> None:
        """End what is being made, and remove every snapshot that nobody reads."""
        self._eager.shutdown(wait=False, cancel_futures=True)
        self._maker.stop()
        self._eager.shutdown(wait=True)
        with self._lock:
            for snapshot in self._snapshots.values():
                snapshot.retire()
            self._snapshots.clear()

    # -- deltas ------------------------------------------------------------------------------------------------------

    def _encode_eagerly(self, old: Snapshot, new: Snapshot) -> None:
        old.lease()
        new.lease()
        future = self._eager.submit(self._encoded, old, new)
        self._chain.append(base_of(old.manifest), base_of(new.manifest), future)
        future.add_done_callback(lambda done: self._encoded_eagerly(done, old, new))

    def _encoded_eagerly(self, future: Future[Delta | None], old: Snapshot, new: Snapshot) -> None:
        self._release(old)
        self._release(new)
        with self._lock:
            self._chain.bound(new.manifest.size_bytes)
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("delta.not_made", version=new.manifest.version, error=str(error))

    def _encoded(self, old: Snapshot, new: Snapshot) -> Delta | None:
        if not same_tensors(old.manifest.tensors, new.manifest.tensors):
            return None
        return _if_smaller(self._maker.encode(old, new), new.manifest, num_merged=1)

    def _delta(self, base: BaseVersion, target: Snapshot, profile: Profile) -> Delta | None:
        """One delta from the base; None when the full snapshot is no larger."""
        with self._lock:
            links = self._chain.path(base, target.manifest.version)
        if links is None:
            steps = [self._from_snapshot(base, target)]
        else:
            until = time.monotonic() + ENCODE_TIMEOUT_S
            steps = [link.wait(max(0.0, until - time.monotonic())) for link in links]
        deltas = [delta for delta in steps if delta is not None]
        if len(deltas) < len(steps):
            return None
        if len(deltas) == 1 and profile is Profile.FAST:
            return deltas[0]
        return self._once(base, target, profile, partial(self._merged, deltas, target, profile))

    def _from_snapshot(self, base: BaseVersion, target: Snapshot) -> Delta | None:
        """Where the chain does not lead: from the base's snapshot, when that is still held."""
        with self._lock:
            old = self._snapshots.get(base.number)
            if old is None or base_of(old.manifest) != base:
                raise BaseUnavailableError(
                    f"nothing leads here from version {base.number} with digest {base.digest}; "
                    "ask for the full snapshot"
                )
            old.lease()
        try:
            return self._once(base, target, Profile.FAST, partial(self._encoded, old, target))
        finally:
            self._release(old)

    def _merged(self, deltas: list[Delta], target: Snapshot, profile: Profile) -> Delta | None:
        return _if_smaller(self._maker.merge(deltas, target, profile), target.manifest, num_merged=len(deltas))

    def _once(
        self, base: BaseVersion, target: Snapshot, profile: Profile, make: Callable[[], Delta | None]
    ) -> Delta | None:
        version = target.manifest.version
        wait = f"the delta from version {base.number} to {version}"
        return self._made.get((base, version, profile), lambda: _Made(make()), wait, ENCODE_TIMEOUT_S).delta

    def _profile(self, request: PayloadRequest) -> Profile:
        if self._config.profile != "auto":
            return Profile(self._config.profile)
        slow = 0 < request.link_bytes_per_s < SMALL_BELOW_BYTES_PER_S
        return Profile.SMALL if slow else Profile.FAST

    # -- leases ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _leased(self, request: PayloadRequest) -> Iterator[Snapshot]:
        with self._lock:
            snapshot = self._snapshots.get(request.version)
            if request.run_id != self._run_id or request.policy != self._policy or snapshot is None:
                held = f"run {self._run_id}, policy {self._policy}, versions {list(self._snapshots)}"
                raise VersionUnavailableError(
                    f"version {request.version} of policy {request.policy} of run {request.run_id} is not held here "
                    f"({held})"
                )
            snapshot.lease()
        try:
            yield snapshot
        finally:
            self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot.release()


@dataclass(frozen=True, slots=True)
class _Made:
    """What became of a delta that was asked for."""

    delta: Delta | None

    @property
    def size_bytes(self) -> int:
        return self.delta.size_bytes if self.delta is not None else 0


def _if_smaller(delta: Delta, target: Manifest, *, num_merged: int) -> Delta | None:
    """None when the full snapshot is no larger."""
    log.info(
        "delta.made",
        payload=delta.payload.payload_id,
        size_bytes=delta.size_bytes,
        full_bytes=target.size_bytes,
        num_merged=num_merged,
        seconds=round(delta.payload.encode_s, 3),
    )
    return delta if delta.size_bytes < target.size_bytes else None
