"""Keeps one policy's engine on the newest version: fetch and verify while generating, then change between two steps.

Only the newest announced version is fetched; older ones are skipped. Whatever goes wrong, the replica keeps serving
what it holds, says why, and tries again: the next source, then after a pause, then in full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from services.common.aio import backoff
from services.common.errors import InfrastructureError, MillraceError
from services.common.types import WeightVersion
from services.common.weights.manifest import BaseVersion, Payload
from services.inference.engine.base import Engine
from services.inference.weights.fetch import fetch
from services.inference.weights.mirror import Mirror, Verified

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One version that arrived, stage by stage."""

    version: int
    mode: str  # full or delta
    num_bytes: int
    num_changes: int
    fetch_s: float
    verify_s: float
    write_s: float
    pause_s: float  # that decoding stood still

    @property
    def bits_per_change(self) -> float:
        return 8 * self.num_bytes / self.num_changes if self.num_changes else 0.0


class WeightUpdater:
    """One policy of one replica. ``run`` is its task; ``offer`` tells it of a version."""

    def __init__(
        self,
        mirror: Mirror,
        engine: Engine,
        run_id: Callable[[], str],
        host_tensors: Callable[[Mirror], Mapping[str, Any]] = Mirror.host_tensors,
    ) -> None:
        self._mirror = mirror
        self._engine = engine
        self._run_id = run_id
        self._host_tensors = host_tensors
        self._wanted: WeightVersion | None = None
        self._changed = asyncio.Event()
        self._in_engine: BaseVersion | None = mirror.base
        self._force_full = False
        self.last: Transfer | None = None
        self.num_failures = 0

    def offer(self, version: WeightVersion) -> None:
        """A version exists. The newest wins; one that is held already is not fetched again."""
        if self._wanted is not None and version.number < self._wanted.number:
            return
        self._wanted = version
        self._changed.set()

    def held(self) -> WeightVersion:
        """What the engine computes with; number -1 when nothing is loaded."""
        if self._in_engine is None:
            return WeightVersion(policy=self._mirror.policy, number=-1, digest="")
        return WeightVersion(policy=self._mirror.policy, number=self._in_engine.number, digest=self._in_engine.digest)

    def gauges(self) -> dict[str, float]:
        """For the replica's report."""
        last = self.last
        known = {"weights_failures": float(self.num_failures)}
        if last is not None:
            known |= {
                "weights_version": float(last.version),
                "weights_bytes": float(last.num_bytes),
                "weights_bits_per_change": last.bits_per_change,
                "weights_fetch_s": last.fetch_s,
                "swap_pause_s": last.pause_s,
            }
        return known

    async def run(self) -> None:
        """Follow the offers. No deadline: it waits for the next version as long as the replica lives."""
        delays = backoff(0.2)
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            if wanted is None or self._holds(wanted):
                continue
            try:
                await self._take(wanted)
                delays = backoff(0.2)
            except MillraceError as error:
                self.num_failures += 1
                self._force_full = True  # whatever was wrong with the delta, the snapshot does not depend on it
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
                await asyncio.sleep(delay)
                self._changed.set()

    async def _take(self, wanted: WeightVersion) -> None:
        began = time.monotonic()
        payload, data = await self._fetch(wanted)
        fetched = time.monotonic()
        verified: Verified = await asyncio.to_thread(self._mirror.verify, payload, data)
        checked = time.monotonic()
        # The mirror's arrays are what the engine copies from, so both change while the engine keeps its old copy.
        await asyncio.to_thread(self._mirror.write, verified)
        written = time.monotonic()
        pause_s = await self._engine.update(self._host_tensors(self._mirror), wanted.number)
        self._in_engine = BaseVersion(number=wanted.number, digest=wanted.digest)
        self._force_full = False
        self.last = Transfer(
            version=wanted.number,
            mode=payload.encoding.value,
            num_bytes=payload.size_bytes,
            num_changes=verified.num_changes,
            fetch_s=fetched - began,
            verify_s=checked - fetched,
            write_s=written - checked,
            pause_s=pause_s,
        )
        log.info(
            "weights.updated",
            policy=wanted.policy,
            version=wanted.number,
            mode=self.last.mode,
            size_bytes=payload.size_bytes,
            fetch_s=round(self.last.fetch_s, 4),
            pause_s=round(pause_s, 5),
        )

    async def _fetch(self, wanted: WeightVersion) -> tuple[Payload, memoryview]:
        if not wanted.sources:
            raise InfrastructureError(f"nobody serves version {wanted.number} of {wanted.policy} yet")
        base = None if self._force_full else self._mirror.base
        for source in wanted.sources[:-1]:
            try:
                fetched = await fetch(source, self._run_id(), wanted, base)
                return fetched.payload, fetched.data
            except MillraceError as error:
                log.warning("weights.source_failed", source=source, reason=error.reason, error=error.message)
        fetched = await fetch(wanted.sources[-1], self._run_id(), wanted, base)
        return fetched.payload, fetched.data

    def _holds(self, version: WeightVersion) -> bool:
        return self._in_engine == BaseVersion(number=version.number, digest=version.digest)
