"""Stores the payloads of a publisher: the last snapshots, and one delta to each of them from any version of a receiver.

    add(v7) --> encode v6->v7 (in a thread) --> chain of the last deltas --> merge for a receiver at v4, cached

The delta from a version's predecessor is coded in advance. Deltas over several versions are merged at the first request, and
concurrent requests share the computation (``receiver_deltas``). Both work without the base's snapshot: the chain's digest
shows whether a receiver holds the right base. With ``transfer: auto``, ``TransferChoice`` decides whether a receiver gets a
delta, and no delta is coded while no receiver fetches one.

A ``PayloadSource``, independent of gRPC. Readers hold leases, so that a payload is never removed during a read. A request
with ``wait_s`` never waits longer: its answer is then that the payload is not ready.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from services.common.config.training.policy import WeightsConfig
from services.common.errors import NotFoundError, VersionConflictError, VersionUnavailableError
from services.common.telemetry.log_events import LogEvent
from services.common.transfer.source import MemoryReader, PayloadReader
from services.common.weights.manifest import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    ReceiverRates,
    full_payload_id,
)
from services.common.weights.snapshot_file import Snapshot
from services.trainer.publish.deltas import Delta, DeltaMaker
from services.trainer.publish.receiver_deltas import Maker, ReceiverDeltas

log = structlog.get_logger()

MOST_THREADS = 4  # two code 1.6 times as fast as one, four 1.9 times: the interpreter lock limits the gain

_NEWEST_WEIGHT = 0.5  # of a new measurement in the running mean
_KEPT_CHOICES = 8  # versions
_IDLE_VERSIONS = 4  # without a request for a delta, before deltas are no longer coded in advance


class PublisherStore:
    """The versions of one policy of one run. One thread calls ``add``; all other methods are safe for threads."""

    def __init__(self, run_id: str, policy: str, config: WeightsConfig, *, maker: Maker | None = None) -> None:
        """``maker``: codes the deltas; left out, a ``DeltaMaker`` on a few threads."""
        self._run_id = run_id
        self._policy = policy
        self._config = config
        # Not held during coding. Reentrant: the callback of a delta may run in the thread that holds the lock.
        self._lock = threading.Condition(threading.RLock())
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._deltas = ReceiverDeltas(
            maker if maker is not None else DeltaMaker(min(MOST_THREADS, len(os.sched_getaffinity(0)))),
            config.keep_deltas,
            self._lock,
            on_coded=self._note_coded,
            on_unused=self._drop_old,
        )
        self._choice = TransferChoice()

    @property
    def newest(self) -> int:
        """The newest version in the store; -1 when the store is empty."""
        return next(reversed(self._snapshots), -1)

    def gauges(self) -> dict[str, float]:
        """For GetStatus."""
        with self._lock:
            return {
                "newest_version": float(self.newest),
                "snapshots": float(len(self._snapshots)),
                **self._deltas.gauges(),
            }

    def add(self, path: Path) -> Manifest:
        """Serve a sealed snapshot, and start coding the delta from the previous one. Idempotent.

        Raises:
            VersionConflictError: its number is served with another digest.
            CorruptDataError, OSError: the file is no snapshot.
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
            if before is not None and self._codes_in_advance(manifest.version):
                self._deltas.append(before, snapshot)
            self._deltas.bound(manifest.size_bytes)
            self._drop_old()
        return manifest

    def _drop_old(self) -> None:
        """Drop the oldest versions. A version that a delta in progress needs stays: its receivers ask for it again."""
        for number in list(self._snapshots)[: -self._config.keep_versions]:
            if not self._deltas.needs(self._snapshots[number]):
                self._snapshots.pop(number).retire()

    def payload(self, request: PayloadRequest) -> Payload:
        """The payload for a version: one delta from the base when that is smaller (``auto``: cheaper), else the snapshot.

        Raises:
            VersionUnavailableError: the version belongs to another run or policy, or is not in the store.
            BaseUnavailableError: no delta leads from that base, or its number has another digest; ask without a base.
            PayloadNotReadyError: the delta is not coded within the request's ``wait_s``.
            DeadlineError: a request without ``wait_s`` waited for ``making_deadline_s``.
        """
        with self._leased(request) as snapshot:
            full = Payload(
                payload_id=full_payload_id(snapshot.manifest),
                encoding=Encoding.FULL,
                size_bytes=snapshot.manifest.size_bytes,
                target=snapshot.manifest,
                file=(snapshot.path, snapshot.data_offset),
            )
            base, every = request.base, self._config.full_every
            if base is None or self._config.transfer == "full" or (every and request.version % every == 0):
                return full
            reason = ""
            if self._config.transfer == "auto":
                with self._lock:
                    choice = self._chosen(request, base, snapshot.manifest)
                reason = choice.reason
                if choice.encoding is Encoding.FULL:
                    return replace(full, choice=reason)
            with self._lock:
                old = self._snapshots.get(base.number)
            delta = self._deltas.get(base, snapshot, old, request.wait_s)
            return replace(full if delta is None else delta.payload, choice=reason)

    def open(self, payload_id: str) -> PayloadReader:
        """Open a payload with a lease. ``NotFoundError`` when the payload was dropped: ask for the manifest again."""
        with self._lock:
            for snapshot in self._snapshots.values():
                if full_payload_id(snapshot.manifest) == payload_id:
                    snapshot.lease()
                    data = snapshot.data[: snapshot.manifest.size_bytes]
                    return MemoryReader(data, partial(self._release, snapshot))
        delta = self._deltas.find(payload_id)
        if delta is None:
            raise NotFoundError(f"payload {payload_id!r} is gone: ask for the manifest again")
        return MemoryReader(memoryview(delta.data))

    def close(self) -> None:
        """Cancel coding, and remove each snapshot after its last reader."""
        self._deltas.close()
        with self._lock:
            for snapshot in self._snapshots.values():
                snapshot.retire()
            self._snapshots.clear()

    # -- deltas ------------------------------------------------------------------------------------------------------

    def _codes_in_advance(self, version: int) -> bool:
        if not self._config.keep_deltas or self._config.transfer == "full":
            return False
        return self._config.transfer == "delta" or self._choice.codes_in_advance(version)

    def _chosen(self, request: PayloadRequest, base: BaseVersion, target: Manifest) -> Choice:
        self._choice.note_receiver(request.rates)
        return self._choice.choose(
            target.version,
            target.size_bytes,
            can_map=request.can_map,
            is_ready=self._deltas.is_made(base, target.version),
        )

    def _note_coded(self, delta: Delta, target: Manifest) -> None:
        self._choice.note_delta(
            size_bytes=delta.size_bytes, full_bytes=target.size_bytes, code_s=delta.payload.encode_s
        )

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
class Choice:
    """The encoding for one version and one kind of receiver, and the reason with the estimated costs."""

    encoding: Encoding
    reason: str


@dataclass(slots=True, kw_only=True)
class MeasuredRates:
    """Running means; 0: not measured."""

    code_s_per_byte: float = 0.0  # of the version
    delta_share: float = 0.0  # bytes of a delta over bytes of its version
    link: float = 0.0  # bytes per second
    decode: float = 0.0  # bytes of the version per second

    def costs_s(self, size_bytes: int, *, is_ready: bool) -> tuple[float, float] | None:
        """Seconds for the delta and for the full snapshot; None before every rate is measured."""
        if not (self.code_s_per_byte and self.link and self.decode):
            return None
        coding = 0.0 if is_ready else size_bytes * self.code_s_per_byte
        delta = coding + size_bytes * self.delta_share / self.link + size_bytes / self.decode
        return delta, size_bytes / self.link


class TransferChoice:
    """Chooses between the delta and the full snapshot for ``weights.transfer: auto``, by measured rates.

        receiver on the publisher's host that maps files   full: no bytes are coded, sent or decoded
        others                                             the cheaper of
            delta   rest of coding + bytes / link + decoding
            full    bytes / link

    One choice per version holds for all receivers on other hosts, because receivers of the same payload pass its parts on to
    each other. Before every rate is measured the choice is the delta: its transfer measures the rates. The caller holds a
    lock.
    """

    def __init__(self) -> None:
        self.rates = MeasuredRates()
        self._choices: dict[int, Choice] = {}
        self._told: set[tuple[int, str]] = set()
        self._last_wanted = -_IDLE_VERSIONS - 1  # the newest version for which a receiver on another host had a base

    def note_receiver(self, rates: ReceiverRates) -> None:
        """Note the rates that a receiver measured."""
        self.rates.link = _mean(self.rates.link, rates.link)
        self.rates.decode = _mean(self.rates.decode, rates.decode)

    def note_delta(self, *, size_bytes: int, full_bytes: int, code_s: float) -> None:
        """Note a coded delta between consecutive versions."""
        self.rates.code_s_per_byte = _mean(self.rates.code_s_per_byte, code_s / max(1, full_bytes))
        self.rates.delta_share = _mean(self.rates.delta_share, size_bytes / max(1, full_bytes))

    def codes_in_advance(self, version: int) -> bool:
        """Whether receivers are expected to fetch a delta to ``version``."""
        last = self._choices.get(self._last_wanted)
        return version - self._last_wanted <= _IDLE_VERSIONS and (last is None or last.encoding is Encoding.DELTA)

    def choose(self, version: int, size_bytes: int, *, can_map: bool, is_ready: bool) -> Choice:
        """The choice for a receiver that holds a base. ``is_ready``: the delta is coded."""
        if can_map:
            return self._tell(version, Choice(Encoding.FULL, "mapped on one host"))
        self._last_wanted = max(self._last_wanted, version)
        known = self._choices.get(version)
        if known is not None:
            return known
        costs = self.rates.costs_s(size_bytes, is_ready=is_ready)
        if costs is None:
            chosen = Choice(Encoding.DELTA, "delta, rates not measured")
        else:
            delta_s, full_s = costs
            cheaper = Encoding.DELTA if delta_s <= full_s else Encoding.FULL
            chosen = Choice(cheaper, f"{cheaper.value}: delta {delta_s:.3g} s, full {full_s:.3g} s")
        self._choices[version] = chosen
        while len(self._choices) > _KEPT_CHOICES:
            del self._choices[min(self._choices)]
        return self._tell(version, chosen)

    def _tell(self, version: int, choice: Choice) -> Choice:
        if (version, choice.reason) not in self._told:
            self._told = {told for told in self._told if told[0] > version - _KEPT_CHOICES} | {(version, choice.reason)}
            log.info(
                LogEvent.TRANSFER_CHOSEN,
                version=version,
                encoding=choice.encoding.value,
                reason=choice.reason,
                link_bytes_per_s=round(self.rates.link),
                decode_bytes_per_s=round(self.rates.decode),
                code_s_per_gb=round(self.rates.code_s_per_byte * 1e9, 3),
                delta_share=round(self.rates.delta_share, 4),
            )
        return choice


def _mean(mean: float, value: float) -> float:
    if value <= 0:
        return mean
    return value if not mean else mean + _NEWEST_WEIGHT * (value - mean)
