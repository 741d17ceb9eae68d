"""Keeps one policy's engine on the newest version: fetches and verifies during generation, switches between two steps.

    offer -> fetch -> verify beside the mirror -> write the mirror -> engine, between two decoding steps
                '------------ any failure: keep serving, log the cause, try again, in full -------------'

Only the newest announced version is fetched; older ones are skipped. The engine gets the changes if its version is the
delta's base, else the whole mirror. ``SourceFetcher`` asks the sources of a version in order, or fetches together with other
replicas under a fetch plan; meanwhile and afterwards, this replica's relay passes the payload on. ``AnnouncedVersions`` takes
the place of both for an engine without weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from services.common.net.hosts import is_here
from services.common.records import FetchPlan, WeightTransfer, WeightVersion
from services.common.telemetry.accounts import Activity, ActivityName, TimeAccount, publisher, weights
from services.common.telemetry.accounts import engine as engine_component
from services.common.telemetry.logs import LogEvent
from services.common.weights.snapshot import (
    BaseVersion,
    Payload,
    PayloadNotReadyError,
    making_deadline_s,
)
from services.inference.engine.base import Engine, WeightUpdate, sharing
from services.inference.weights.fetch import (
    MIN_SHARD_BYTES,
    TRANSPORTS,
    Incoming,
    Relay,
    WeightSource,
    fetch_shards,
    receive_buffer,
)
from services.inference.weights.mirror import Mirror

log = structlog.get_logger()

_MAX_DELTA_FAILURES = 5  # failures in a row before a delta is given up for the snapshot
_TRANSIENT = (InfrastructureError, DeadlineError, NotFoundError, VersionUnavailableError)
UP_TO_DATE = Activity(ActivityName.UP_TO_DATE)
ASK_AGAIN_S = 0.1  # between questions for a delta in the making; the source itself waits for it up to MANIFEST_WAIT_S
CHECKPOINT_DIGEST = "scripted"  # of version 0 of an engine without weights, which is not announced
_KEPT_TRANSFERS = 256  # not yet reported; a replica that cannot report loses the oldest


class WeightUpdater:
    """Updates one policy of one replica. ``run`` is its task; ``offer`` announces a version."""

    def __init__(
        self,
        mirror: Mirror,
        engine: Engine,
        fetcher: SourceFetcher,
        host_tensors: Callable[[Mirror], Mapping[str, Any]] = Mirror.host_tensors,
        account: TimeAccount | None = None,
    ) -> None:
        self.account = account or TimeAccount(weights(mirror.policy), rest=UP_TO_DATE)
        self._publisher = publisher(mirror.policy)
        self._engine_component = engine_component(mirror.policy)
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
            await sharing(self._engine).restore(
                WeightUpdate(version=base.number, whole=self._host_tensors(self._mirror))
            )
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
            if wanted is None or self._in_engine == BaseVersion(number=wanted.number, digest=wanted.digest):
                self.account.enter(*UP_TO_DATE)
                continue
            facts: dict[str, Any] = {  # of the transfer, as far as it gets
                "policy": wanted.policy,
                "version": wanted.number,
                "base_version": self._in_engine.number if self._in_engine else None,
                "started_at": time.time(),
            }
            try:
                await self._take(wanted, plan, facts)
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
                self.num_failures += 1
                # The snapshot does not depend on the delta's fault. A source that is away or busy (computing this delta), or
                # has dropped the version, is no argument against the delta, at first.
                transient = isinstance(error, _TRANSIENT) and num_in_a_row < _MAX_DELTA_FAILURES
                self._force_full = self._force_full or not transient
                if (
                    transient and self._wanted is wanted
                ):  # else a relay's data may be corrupt: fetch from the sources alone
                    self._plan = plan
                self._last_error = f"{error.reason}: {error.message}"
                self._transfers.append(WeightTransfer(**facts, error=self._last_error))
                # One wait over all attempts: its age is the delay of the version.
                self.account.enter(ActivityName.FETCHING, on=self._publisher, detail=self._last_error)
                delay = next(delays)
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

    async def _take(self, wanted: WeightVersion, plan: FetchPlan | None, facts: dict[str, Any]) -> None:
        """Bring a version into the mirror, then into the engine; ``facts`` gets each stage's seconds."""
        wanted_base = BaseVersion(number=wanted.number, digest=wanted.digest)
        update = None
        if self._mirror.base != wanted_base:  # else the last update of the engine failed
            base = None if self._force_full else self._mirror.base
            self.account.enter(ActivityName.FETCHING, on=self._publisher, detail=self._last_error)
            began = time.monotonic()
            fetched = await self._fetcher.fetch(
                wanted, base, plan, lambda: self._wanted is not None and self._wanted.number > wanted.number
            )
            payload = fetched.payload
            facts |= {
                "fetch_s": time.monotonic() - began,
                "encoding": payload.encoding.value,
                "transport": fetched.transport,
                "sources": fetched.sources,
                "payload_size_bytes": payload.size_bytes,
                "full_size_bytes": sum(entry.size_bytes for entry in payload.target.tensors),
                "encode_s": payload.encode_s,
            }
            self.account.enter(ActivityName.VERIFYING)
            good = False
            try:
                began, borrowed = time.monotonic(), fetched.transport == "mapped"
                verified = await asyncio.to_thread(self._mirror.verify, payload, fetched.data, borrowed=borrowed)
                facts |= {"verify_s": time.monotonic() - began, "num_changes": verified.num_changes}
                began = time.monotonic()
                # The engine computes with its own copy until its update.
                async with self._engine_lock:
                    await asyncio.to_thread(self._mirror.write, verified)
                facts["write_s"] = time.monotonic() - began
                good = True
            finally:
                self._fetcher.settled(fetched, good=good)
            dtypes = {entry.dtype for entry in verified.manifest.tensors}
            if payload.base is not None and payload.base == self._in_engine and len(dtypes) <= 1:
                changes, dtype = verified.changes, "".join(dtypes)
                update = WeightUpdate(version=wanted.number, changes=changes, dtype=dtype, complete=False)
        if update is None:
            update = WeightUpdate(version=wanted.number, whole=self._host_tensors(self._mirror))
        with self.account.during(ActivityName.CHANGING_WEIGHTS, on=self._engine_component):
            async with self._engine_lock:
                # An engine that has got its memory back meanwhile has read the mirror.
                pause_s = 0.0 if self._in_engine == wanted_base else await self._engine.update(update)
                self._in_engine = wanted_base
        self.on_held()
        self._force_full = False
        self.last = done = WeightTransfer(**facts, pause_s=pause_s)
        self._transfers.append(done)
        log.info(
            LogEvent.WEIGHTS_UPDATED,
            policy=wanted.policy,
            version=wanted.number,
            mode=done.encoding,
            transport=done.transport,
            size_bytes=done.payload_size_bytes,
            fetch_s=round(done.fetch_s, 4),
            pause_s=round(pause_s, 5),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A payload and its bytes, not verified yet."""

    payload: Payload
    data: memoryview  # aligned and writable: the tensors of a full payload may be views of this memory
    transport: str  # "mapped", "bulk" or "grpc"; mapped data keeps its file's memory until the last view is gone
    sources: tuple[str, ...]  # most bytes first


class SourceFetcher:
    """Fetches for one policy of one replica."""

    def __init__(
        self,
        run_id: str,
        transports: Sequence[str] = TRANSPORTS,
        relay: Relay | None = None,
        on_bytes: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_bytes`` is called after every received piece of a payload."""
        self._on_bytes = on_bytes
        self._waiting_since: float | None = None  # for a delta that is being made
        self._run_id = run_id
        self._transports = tuple(transports)
        self._relay = relay

    async def fetch(
        self,
        wanted: WeightVersion,
        base: BaseVersion | None,
        plan: FetchPlan | None,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        """The payload that makes a version: a delta against ``base`` when the source has one, else the snapshot.

        A delta that is being made is awaited for ``making_deadline_s``, then the snapshot is fetched.

        Raises the last source's error:
            SupersededError: the delta is not begun, and ``is_superseded`` says that a newer version is wanted.
            InfrastructureError, DeadlineError: the source does not answer, or none is known.
            VersionUnavailableError: the source does not hold the version.
            CorruptDataError: the payload is another version than the ledger's, or ends early.
        """
        if not wanted.sources:
            raise InfrastructureError(f"no source serves version {wanted.number} of {wanted.policy} yet")
        sources = wanted.sources
        if "mapped" in self._transports and is_here(sources[-1].rpartition(":")[0]):
            # The publisher, named last, comes first on its own host: mapping its file costs the publisher no work.
            sources = (sources[-1], *sources[:-1])
        for address in sources:
            try:
                async with WeightSource(address, self._run_id, transports=self._transports) as source:
                    payload = await self._payload(source, wanted, base, is_superseded)
                    by: tuple[str, ...] = (address,)
                    data = source.mapped(payload)
                    if data is None:
                        incoming = Incoming(payload, receive_buffer(payload.size_bytes), self._on_bytes)
                        if self._relay is not None:
                            self._relay.receive(incoming)
                        try:
                            if plan is not None and payload.size_bytes >= 2 * MIN_SHARD_BYTES:
                                by = await fetch_shards(payload, incoming, plan, source, self._run_id)
                            else:
                                await source.fetch(payload, incoming.shard(0, payload.size_bytes))
                        except BaseException:  # cancellations too: readers of the relay must not wait for ever
                            if self._relay is not None:
                                self._relay.lost(payload.payload_id)
                            raise
                        data = incoming.data
                    return Fetched(payload=payload, data=data, transport=source.transport, sources=by)
            except RollmillError as error:
                if address == sources[-1] or isinstance(error, SupersededError):
                    raise
                log.warning("weights.source_failed", source=address, reason=error.reason, error=error.message)
        raise AssertionError("the last source returns or raises")

    def settled(self, fetched: Fetched, *, good: bool) -> None:
        """Note that the mirror has the payload (``good``), or has refused it."""
        if self._relay is not None:
            if good:
                self._relay.received(fetched.payload, fetched.data)
            else:
                self._relay.lost(fetched.payload.payload_id)

    async def _payload(
        self, source: WeightSource, wanted: WeightVersion, base: BaseVersion | None, is_superseded: Callable[[], bool]
    ) -> Payload:
        """The manifest. Waits for a delta that is being made, and gives it up for the snapshot at the deadline."""
        while True:
            try:
                payload = await source.payload(wanted, base)
            except PayloadNotReadyError as error:
                now = time.monotonic()
                if self._waiting_since is None:
                    self._waiting_since = now
                if now - self._waiting_since > making_deadline_s(error.size_bytes):
                    log.warning(
                        LogEvent.WEIGHTS_GAVE_UP_DELTA,
                        policy=wanted.policy,
                        version=wanted.number,
                        waited_s=round(now - self._waiting_since, 1),
                    )
                    self._waiting_since, base = None, None
                    continue
                if is_superseded() and not error.started:
                    raise SupersededError(
                        f"the delta to version {wanted.number} of {wanted.policy} is not begun: a newer version is wanted"
                    ) from None
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                self._waiting_since = None
                return payload


class AnnouncedVersions:
    """Follows the versions of one policy for an engine without weights (scripted): an announced version is held at once.

    The interface of ``WeightUpdater``, without mirror, publisher and transfer, so that a run needs no model. The version is -1
    until the first announcement; for a policy that is not trained, 0 from the start.
    """

    def __init__(self, policy: str, engine: Engine, first: int = -1) -> None:
        self._engine = engine
        self.account = TimeAccount(weights(policy), rest=UP_TO_DATE)
        self._held = WeightVersion(policy=policy, number=first, digest=CHECKPOINT_DIGEST if first == 0 else "")
        self._wanted = self._held
        self._changed = asyncio.Event()
        self.on_held: Callable[[], None] = lambda: None

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None:
        """Announce a version; the newest is held."""
        if version.number >= self._wanted.number:
            self._wanted = version
            self._changed.set()

    def held(self) -> WeightVersion:
        """The version of the engine's tokens; number -1 before the first announcement of a trained policy."""
        return self._held

    def gauges(self) -> dict[str, float]:
        return {"weights_version": float(self._held.number)}

    def take_transfers(self) -> tuple[WeightTransfer, ...]:
        """Always empty."""
        return ()

    async def release(self) -> None:
        """Stop the engine. New versions are held at once all the same."""
        await sharing(self._engine).release()

    async def restore(self) -> None:
        """Let the engine go on, with the newest version."""
        await sharing(self._engine).restore(WeightUpdate(version=self._held.number, complete=False))

    async def run(self) -> None:
        """Follow the offers. No deadline: the next version may take as long as the replica lives."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            with self.account.during(ActivityName.CHANGING_WEIGHTS, on=engine_component(wanted.policy)):
                await self._engine.update(WeightUpdate(version=wanted.number, complete=False))
            self.account.beat()
            self._held = WeightVersion(policy=wanted.policy, number=wanted.number, digest=wanted.digest)
            self.on_held()
