"""Fetches a version from its sources in order, or together with other replicas under a fetch plan.

While a payload arrives, and afterwards, this replica's relay passes it on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from services.common.errors import InfrastructureError, RollmillError, SupersededError
from services.common.net.hosts import host_of, is_here
from services.common.records.types import FetchPlan, WeightVersion
from services.common.telemetry.log_events import LogEvent
from services.common.weights.manifest import BaseVersion, Encoding, Payload, ReceiverRates
from services.common.weights.not_ready import PayloadNotReadyError, making_deadline_s
from services.inference.weights.peer_fetch import MIN_SHARD_BYTES, PeerFetch
from services.inference.weights.relay import Incoming, Relay
from services.inference.weights.source import TRANSPORTS, WeightSource
from services.inference.weights.transports import receive_buffer

log = structlog.get_logger()

_MEASURED_BYTES = 4 << 20  # a smaller payload measures the latency of the link, not its speed


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
        self._rates = ReceiverRates()
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
        sources = self._in_order(wanted.sources)
        for source in sources[:-1]:
            try:
                return await self._from(source, wanted, base, plan, is_superseded)
            except SupersededError:
                raise
            except RollmillError as error:
                log.warning("weights.source_failed", source=source, reason=error.reason, error=error.message)
        return await self._from(sources[-1], wanted, base, plan, is_superseded)

    def settled(self, fetched: Fetched, *, good: bool, verify_s: float = 0.0) -> None:
        """Note that the mirror has the payload (``good``), decoded and verified in ``verify_s``, or has refused it."""
        if good and verify_s and fetched.payload.encoding is Encoding.DELTA:
            whole = sum(entry.size_bytes for entry in fetched.payload.target.tensors)
            self._rates = replace(self._rates, decode=whole / verify_s)
        if self._relay is None:
            return
        if good:
            self._relay.received(fetched.payload, fetched.data)
        else:
            self._relay.lost(fetched.payload.payload_id)

    def _in_order(self, sources: Sequence[str]) -> Sequence[str]:
        """The publisher, named last, comes first on its own host: mapping its file costs the publisher no work."""
        publisher = sources[-1]
        if "mapped" in self._transports and is_here(host_of(publisher)):
            return (publisher, *sources[:-1])
        return sources

    async def _from(
        self,
        address: str,
        wanted: WeightVersion,
        base: BaseVersion | None,
        plan: FetchPlan | None,
        is_superseded: Callable[[], bool],
    ) -> Fetched:
        source = WeightSource(address, self._run_id, transports=self._transports, rates=self._rates)
        async with source:
            payload = await self._payload(source, wanted, base, is_superseded)
            sources: tuple[str, ...] = (address,)
            data = source.mapped(payload)
            if data is None:
                data = receive_buffer(payload.size_bytes)
                began = time.monotonic()
                sources = await self._receive(source, payload, data, plan)
                if payload.size_bytes >= _MEASURED_BYTES:
                    self._rates = replace(self._rates, link=payload.size_bytes / (time.monotonic() - began))
            return Fetched(payload=payload, data=data, transport=source.transport, sources=sources)

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
                await asyncio.sleep(error.after_s)
            else:
                self._waiting_since = None
                return payload

    async def _receive(
        self, source: WeightSource, payload: Payload, data: memoryview, plan: FetchPlan | None
    ) -> tuple[str, ...]:
        """Fill the buffer; returns the sources of the bytes, the largest share first."""
        incoming = Incoming(payload, data, self._on_bytes)
        if self._relay is not None:
            self._relay.receive(incoming)
        try:
            if plan is not None and payload.size_bytes >= 2 * MIN_SHARD_BYTES:
                return await PeerFetch(payload, incoming, plan, source, self._run_id).run()
            await source.fetch(payload, incoming.shard(0, payload.size_bytes))
            return (source.address,)
        except BaseException:  # cancellations too: concurrent readers must not wait for bytes that will not come
            if self._relay is not None:
                self._relay.lost(payload.payload_id)
            raise
