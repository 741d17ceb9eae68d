"""Keeps one policy's engine on the newest version: fetches and verifies during generation, switches between two steps.

    offer -> fetch -> verify beside the mirror -> write the mirror -> engine, between two decoding steps
                '------------ any failure: keep serving, log the cause, try again, in full -------------'

Only the newest announced version is fetched; older ones are skipped. The engine gets the changes if its version is the
delta's base, else the whole mirror.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import structlog

from services.common.aio import backoff
from services.common.errors import (
    DeadlineError,
    InfrastructureError,
    NotFoundError,
    RollmillError,
    SupersededError,
    VersionUnavailableError,
)
from services.common.records.types import FetchPlan, WeightTransfer, WeightVersion
from services.common.telemetry import components
from services.common.telemetry.accounts import Activity, TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.log_events import LogEvent
from services.common.weights.manifest import BaseVersion, Manifest
from services.inference.engine.base import Engine, sharing
from services.inference.engine.weight_update import WeightUpdate
from services.inference.weights.fetcher import Fetched
from services.inference.weights.mirror import Mirror, Verified

log = structlog.get_logger()

_MAX_DELTA_FAILURES = 5  # failures in a row before a delta is given up for the snapshot
_TRANSIENT = (InfrastructureError, DeadlineError, NotFoundError, VersionUnavailableError)
UP_TO_DATE = Activity(ActivityName.UP_TO_DATE)
_KEPT_TRANSFERS = 256  # not yet reported; a replica that cannot report loses the oldest


class Fetcher(Protocol):
    """Fetches a payload from any source."""

    async def fetch(
        self,
        wanted: WeightVersion,
        base: BaseVersion | None,
        plan: FetchPlan | None,
        is_superseded: Callable[[], bool],
    ) -> Fetched:
        """A delta from ``base``, or the full snapshot. Raises a ``RollmillError``.

        ``SupersededError``: ``is_superseded`` says that a newer version is wanted, and that one is served sooner.
        """
        ...

    def settled(self, fetched: Fetched, *, good: bool, verify_s: float = 0.0) -> None:
        """Note that the mirror has the payload (``good``), decoded and verified in ``verify_s``, or has refused it."""
        ...


@dataclass(slots=True)
class _Attempt:
    """Facts about a running transfer."""

    record: WeightTransfer
    began: float

    def stage(self, name: str, **facts: Any) -> None:
        """Note the end of a stage."""
        now = time.monotonic()
        known: dict[str, Any] = {name: now - self.began, **facts}
        self.record = replace(self.record, **known)
        self.began = now


class WeightUpdater:
    """Updates one policy of one replica. ``run`` is its task; ``offer`` announces a version."""

    def __init__(
        self,
        mirror: Mirror,
        engine: Engine,
        fetcher: Fetcher,
        host_tensors: Callable[[Mirror], Mapping[str, Any]] = Mirror.host_tensors,
        account: TimeAccount | None = None,
    ) -> None:
        self.account = account or TimeAccount(components.weights(mirror.policy), rest=UP_TO_DATE)
        self._publisher = components.publisher(mirror.policy)
        self._engine_component = components.engine(mirror.policy)
        self._mirror = mirror
        self._engine = engine
        self._fetcher = fetcher
        self._host_tensors = host_tensors
        self._wanted: WeightVersion | None = None
        self._plan: FetchPlan | None = None
        self._changed = asyncio.Event()
        self.on_held: Callable[[], None] = lambda: None
        self._in_engine: BaseVersion | None = mirror.base
        self._force_full = False
        # Of engine and mirror: an engine that gets its memory back reads the mirror.
        self._engine_lock = asyncio.Lock()
        self._transfers: deque[WeightTransfer] = deque(maxlen=_KEPT_TRANSFERS)
        self.last: WeightTransfer | None = None  # that arrived
        self.num_failures = 0
        self._last_error = ""  # the error of the last attempt for the wanted version

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        """Announce a version. The newest is fetched, unless already held."""
        if self._wanted is not None and version.number < self._wanted.number:
            return
        self._wanted, self._plan = version, plan
        self._changed.set()

    def held(self) -> WeightVersion:
        """The engine's version; number -1 before the first load."""
        if self._in_engine is None:
            return WeightVersion(policy=self._mirror.policy, number=-1, digest="")
        return WeightVersion(policy=self._mirror.policy, number=self._in_engine.number, digest=self._in_engine.digest)

    async def release(self) -> None:
        """Free the engine's memory. New versions go on to the mirror."""
        async with self._engine_lock:
            await sharing(self._engine).release()

    async def restore(self) -> None:
        """Give the engine its memory again, with the newest version of the mirror.

        Raises:
            InfrastructureError: a write into the mirror was interrupted. The process must end.
        """
        async with self._engine_lock:
            base = self._mirror.base
            if base is None:
                raise InfrastructureError(
                    f"the mirror of {self._mirror.policy} holds no whole version to fill the engine with"
                )
            await sharing(self._engine).restore(self._whole(base.number))
            self._in_engine = base

    def take_transfers(self) -> tuple[WeightTransfer, ...]:
        """Transfers that ended since the last call, failed ones included."""
        taken = tuple(self._transfers)
        self._transfers.clear()
        return taken

    def gauges(self) -> dict[str, float]:
        """For the replica's report."""
        known = {"weights_failures": float(self.num_failures)}
        if self.last is not None:
            known |= {
                "weights_version": float(self.last.version),
                "weights_bytes": float(self.last.payload_size_bytes),
                "weights_bits_per_change": self.last.bits_per_change,
                "weights_fetch_s": self.last.fetch_s,
                "swap_pause_s": self.last.pause_s,
            }
        return known

    async def run(self) -> None:
        """Follow the offers. No deadline: the next version may take as long as the replica lives."""
        delays, num_in_a_row = backoff(0.2), 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted, plan, self._plan = self._wanted, self._plan, None
            if wanted is None or self._holds(wanted):
                self.account.enter(*UP_TO_DATE)
                continue
            attempt = _Attempt(self._record(wanted), time.monotonic())
            try:
                await self._take(wanted, plan, attempt)
                self.account.enter(*UP_TO_DATE)
                self.account.beat()
                self._last_error = ""
                delays, num_in_a_row = backoff(0.2), 0
            except SupersededError as superseded:
                log.info("weights.skipped", policy=wanted.policy, version=wanted.number, reason=superseded.message)
                self._changed.set()
            except (RollmillError, MemoryError, OSError) as caught:  # no memory, no descriptors: generation continues
                error = caught if isinstance(caught, RollmillError) else InfrastructureError(repr(caught))
                num_in_a_row += 1
                delay = next(delays)
                self._failed(wanted, plan, attempt, error, num_in_a_row)
                log.warning(
                    LogEvent.WEIGHTS_KEPT_OLD,
                    policy=wanted.policy,
                    wanted=wanted.number,
                    serving=self.held().number,
                    reason=error.reason,
                    error=error.message,
                    retry_s=round(delay, 2),
                )
                await asyncio.sleep(delay)
                self._changed.set()

    def _failed(
        self, wanted: WeightVersion, plan: FetchPlan | None, attempt: _Attempt, error: RollmillError, num_in_a_row: int
    ) -> None:
        """Note a failed attempt, and choose the payload and the sources of the next one."""
        self.num_failures += 1
        # The snapshot does not depend on the delta's fault. A source that is away or busy (computing this delta), or has
        # dropped the version, is no argument against the delta, at first.
        transient = isinstance(error, _TRANSIENT) and num_in_a_row < _MAX_DELTA_FAILURES
        self._force_full = self._force_full or not transient
        if transient and self._wanted is wanted:  # else a relay's data may be corrupt: fetch from the sources alone
            self._plan = plan
        self._last_error = f"{error.reason}: {error.message}"
        self._transfers.append(replace(attempt.record, error=self._last_error))
        # One wait over all attempts: its age is the delay of the version.
        self.account.enter(ActivityName.FETCHING, on=self._publisher, detail=self._last_error)

    async def _take(self, wanted: WeightVersion, plan: FetchPlan | None, attempt: _Attempt) -> None:
        wanted_base = BaseVersion(number=wanted.number, digest=wanted.digest)
        if self._mirror.base == wanted_base:  # the last update of the engine failed
            update = self._whole(wanted.number)
        else:
            verified, from_base = await self._into_mirror(wanted, plan, attempt)
            changes_do = from_base is not None and from_base == self._in_engine and _one_type(verified.manifest)
            update = _changes(verified) if changes_do else self._whole(wanted.number)
        with self.account.during(ActivityName.CHANGING_WEIGHTS, on=self._engine_component):
            async with self._engine_lock:
                # An engine that has got its memory back meanwhile has read the mirror.
                pause_s = 0.0 if self._in_engine == wanted_base else await self._engine.update(update)
                self._in_engine = wanted_base
        attempt.record = replace(attempt.record, pause_s=pause_s)
        self.on_held()
        self._force_full = False
        self.last = attempt.record
        self._transfers.append(attempt.record)
        log.info(
            LogEvent.WEIGHTS_UPDATED,
            policy=wanted.policy,
            version=wanted.number,
            mode=attempt.record.encoding,
            transport=attempt.record.transport,
            choice=attempt.record.choice,
            size_bytes=attempt.record.payload_size_bytes,
            fetch_s=round(attempt.record.fetch_s, 4),
            pause_s=round(pause_s, 5),
        )

    async def _into_mirror(
        self, wanted: WeightVersion, plan: FetchPlan | None, attempt: _Attempt
    ) -> tuple[Verified, BaseVersion | None]:
        """Write a payload into the mirror; returns the changes and their base version."""
        base = None if self._force_full else self._mirror.base
        self.account.enter(ActivityName.FETCHING, on=self._publisher, detail=self._last_error)
        fetched = await self._fetcher.fetch(wanted, base, plan, partial(self._is_superseded, wanted))
        payload = fetched.payload
        attempt.stage(
            "fetch_s",
            encoding=payload.encoding.value,
            transport=fetched.transport,
            sources=fetched.sources,
            payload_size_bytes=payload.size_bytes,
            full_size_bytes=sum(entry.size_bytes for entry in payload.target.tensors),
            encode_s=payload.encode_s,
            choice=payload.choice,
        )
        good = False
        try:
            borrowed = fetched.transport == "mapped"
            self.account.enter(ActivityName.VERIFYING)
            verified = await asyncio.to_thread(self._mirror.verify, payload, fetched.data, borrowed=borrowed)
            attempt.stage("verify_s", num_changes=verified.num_changes)
            # The engine computes with its own copy until its update.
            async with self._engine_lock:
                await asyncio.to_thread(self._mirror.write, verified)
            attempt.stage("write_s")
            good = True
        finally:
            self._fetcher.settled(fetched, good=good, verify_s=attempt.record.verify_s)
        return verified, payload.base

    def _whole(self, version: int) -> WeightUpdate:
        return WeightUpdate.full(self._host_tensors(self._mirror), version)

    def _record(self, wanted: WeightVersion) -> WeightTransfer:
        held = self._in_engine
        return WeightTransfer(
            policy=wanted.policy,
            version=wanted.number,
            base_version=held.number if held else None,
            started_at=time.time(),
        )

    def _is_superseded(self, version: WeightVersion) -> bool:
        return self._wanted is not None and self._wanted.number > version.number

    def _holds(self, version: WeightVersion) -> bool:
        return self._in_engine == BaseVersion(number=version.number, digest=version.digest)


def _changes(verified: Verified) -> WeightUpdate:
    manifest = verified.manifest
    dtype = manifest.tensors[0].dtype if manifest.tensors else ""
    return WeightUpdate(version=manifest.version, changes=verified.changes, dtype=dtype, complete=False)


def _one_type(manifest: Manifest) -> bool:
    return len({entry.dtype for entry in manifest.tensors}) <= 1
