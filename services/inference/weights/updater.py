"""Keeps one policy's engine on the newest version: fetch and verify while generating, then change between two steps.

    offer -> fetch -> verify beside the mirror -> write the mirror -> engine, between two decoding steps
                '------------ whatever goes wrong: keep serving, say why, try again, in full -----------'

Only the newest announced version is fetched; older ones are skipped. The engine gets what changed when it stands on the
delta's base, and the whole mirror otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from services.common.accounts import Activity, TimeAccount
from services.common.aio import backoff
from services.common.errors import (
    DeadlineError,
    InfrastructureError,
    MillraceError,
    NotFoundError,
    VersionUnavailableError,
)
from services.common.types import FetchPlan, WeightTransfer, WeightVersion
from services.common.weights.manifest import BaseVersion, Manifest
from services.inference.engine.base import Engine
from services.inference.engine.weight_update import WeightUpdate
from services.inference.weights.fetch import Fetched
from services.inference.weights.mirror import Mirror
from services.inference.weights.verify import Verified

log = structlog.get_logger()

_PATIENCE = 5  # failures in a row before a delta that does not come is given up for the snapshot
_NOT_THE_DELTA = (InfrastructureError, DeadlineError, NotFoundError, VersionUnavailableError)
UP_TO_DATE = Activity("up to date")
FETCHING = "fetching a version"
_KEPT_TRANSFERS = 256  # not yet reported; a replica that cannot report loses the oldest


class Fetcher(Protocol):
    """Brings a payload, from whoever has it."""

    async def fetch(self, wanted: WeightVersion, base: BaseVersion | None, plan: FetchPlan | None) -> Fetched:
        """A delta from ``base``, or the full snapshot. Raises a ``MillraceError`` that says why not."""
        ...

    def settled(self, fetched: Fetched, *, good: bool) -> None:
        """What was fetched is in the mirror, or was found wanting."""
        ...


@dataclass(slots=True)
class _Attempt:
    """What is known of a transfer so far."""

    record: WeightTransfer
    began: float

    def stage(self, name: str, **facts: Any) -> None:
        """A stage has ended now."""
        now = time.monotonic()
        known: dict[str, Any] = {name: now - self.began, **facts}
        self.record = replace(self.record, **known)
        self.began = now


class WeightUpdater:
    """One policy of one replica. ``run`` is its task; ``offer`` tells it of a version."""

    def __init__(
        self,
        mirror: Mirror,
        engine: Engine,
        fetcher: Fetcher,
        host_tensors: Callable[[Mirror], Mapping[str, Any]] = Mirror.host_tensors,
        account: TimeAccount | None = None,
    ) -> None:
        self.account = account or TimeAccount(f"weights/{mirror.policy}", rest=UP_TO_DATE)
        self._publisher = f"publisher/{mirror.policy}"
        self._mirror = mirror
        self._engine = engine
        self._fetcher = fetcher
        self._host_tensors = host_tensors
        self._wanted: WeightVersion | None = None
        self._plan: FetchPlan | None = None
        self._changed = asyncio.Event()
        self._in_engine: BaseVersion | None = mirror.base
        self._force_full = False
        self._transfers: deque[WeightTransfer] = deque(maxlen=_KEPT_TRANSFERS)
        self.last: WeightTransfer | None = None  # that arrived
        self.num_failures = 0
        self._trouble = ""  # what the last attempt for the wanted version failed with

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        """A version exists. The newest wins; one that is held already is not fetched again."""
        if self._wanted is not None and version.number < self._wanted.number:
            return
        self._wanted, self._plan = version, plan
        self._changed.set()

    def held(self) -> WeightVersion:
        """What the engine computes with; number -1 when nothing is loaded."""
        if self._in_engine is None:
            return WeightVersion(policy=self._mirror.policy, number=-1, digest="")
        return WeightVersion(policy=self._mirror.policy, number=self._in_engine.number, digest=self._in_engine.digest)

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
        """Follow the offers. No deadline: it waits for the next version as long as the replica lives."""
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
                self._trouble = ""
                delays, num_in_a_row = backoff(0.2), 0
            except (MillraceError, MemoryError, OSError) as caught:  # no memory, no descriptors: generating goes on
                error = caught if isinstance(caught, MillraceError) else InfrastructureError(repr(caught))
                self.num_failures += 1
                num_in_a_row += 1
                # The snapshot does not depend on whatever was wrong with the delta. A source that is away or busy (making
                # this very delta), or has let go of what was wanted, says nothing against it, at first.
                innocent = isinstance(error, _NOT_THE_DELTA) and num_in_a_row < _PATIENCE
                self._force_full = self._force_full or not innocent
                if innocent and self._wanted is wanted:  # else a relay may have lied: the sources alone are relied on
                    self._plan = plan
                self._transfers.append(replace(attempt.record, error=f"{error.reason}: {error.message}"))
                delay = next(delays)
                log.warning(
                    "weights.kept_old",
                    policy=wanted.policy,
                    wanted=wanted.number,
                    serving=self.held().number,
                    reason=error.reason,
                    error=error.message,
                    retry_s=round(delay, 2),
                )
                # One wait, however many attempts: its age is how long the version does not arrive.
                self._trouble = f"{error.reason}: {error.message}"
                self.account.enter(FETCHING, on=self._publisher, detail=self._trouble)
                await asyncio.sleep(delay)
                self._changed.set()

    async def _take(self, wanted: WeightVersion, plan: FetchPlan | None, attempt: _Attempt) -> None:
        wanted_base = BaseVersion(number=wanted.number, digest=wanted.digest)
        if self._mirror.base == wanted_base:  # the engine failed to follow the last time
            update = self._whole(wanted.number)
        else:
            verified, from_base = await self._into_mirror(wanted, plan, attempt)
            changes_do = from_base is not None and from_base == self._in_engine and _one_type(verified.manifest)
            update = _changes(verified) if changes_do else self._whole(wanted.number)
        with self.account.during("changing the engine's weights", on=f"engine/{wanted.policy}"):
            pause_s = await self._engine.update(update)
        attempt.record = replace(attempt.record, pause_s=pause_s)
        self._in_engine = wanted_base
        self._force_full = False
        self.last = attempt.record
        self._transfers.append(attempt.record)
        log.info(
            "weights.updated",
            policy=wanted.policy,
            version=wanted.number,
            mode=attempt.record.encoding,
            transport=attempt.record.transport,
            size_bytes=attempt.record.payload_size_bytes,
            fetch_s=round(attempt.record.fetch_s, 4),
            pause_s=round(pause_s, 5),
        )

    async def _into_mirror(
        self, wanted: WeightVersion, plan: FetchPlan | None, attempt: _Attempt
    ) -> tuple[Verified, BaseVersion | None]:
        """Returns what changed, and since which version."""
        base = None if self._force_full else self._mirror.base
        self.account.enter(FETCHING, on=self._publisher, detail=self._trouble)
        fetched = await self._fetcher.fetch(wanted, base, plan)
        payload = fetched.payload
        attempt.stage(
            "fetch_s",
            encoding=payload.encoding.value,
            profile=payload.profile.value if payload.profile else "",
            transport=fetched.transport,
            sources=fetched.sources,
            payload_size_bytes=payload.size_bytes,
            full_size_bytes=sum(entry.size_bytes for entry in payload.target.tensors),
            encode_s=payload.encode_s,
        )
        good = False
        try:
            borrowed = fetched.transport == "mapped"
            self.account.enter("verifying and writing the mirror")
            verified = await asyncio.to_thread(self._mirror.verify, payload, fetched.data, borrowed=borrowed)
            attempt.stage("verify_s", num_changes=verified.num_changes)
            # The engine keeps computing with its own copy until it is told.
            await asyncio.to_thread(self._mirror.write, verified)
            attempt.stage("write_s")
            good = True
        finally:
            self._fetcher.settled(fetched, good=good)
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

    def _holds(self, version: WeightVersion) -> bool:
        return self._in_engine == BaseVersion(number=version.number, digest=version.digest)


def _changes(verified: Verified) -> WeightUpdate:
    manifest = verified.manifest
    dtype = manifest.tensors[0].dtype if manifest.tensors else ""
    return WeightUpdate(version=manifest.version, changes=verified.changes, dtype=dtype, complete=False)


def _one_type(manifest: Manifest) -> bool:
    return len({entry.dtype for entry in manifest.tensors}) <= 1
