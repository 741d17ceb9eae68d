"""Fetching a payload over ``WeightService``: manifest, then bytes, over the best way that both ends have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.common.types import WeightVersion
from services.common.weights.manifest import BaseVersion, Payload
from services.inference.weights.fetch_links import LinkSpeeds
from services.inference.weights.fetch_range import ByteRange, receive_buffer
from services.inference.weights.fetch_source import TRANSPORTS, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A payload and its bytes, not verified yet."""

    payload: Payload
    data: memoryview  # aligned and the receiver's own to write: the tensors of a full payload may be views of it
    transport: str  # "mapped", "bulk" or "grpc"
    sources: tuple[str, ...]  # most bytes first


# Fills the room; returns who the bytes came from, most first.
Bring = Callable[[WeightSource, Payload, memoryview], Awaitable[tuple[str, ...]]]


async def fetch(
    address: str,
    run_id: str,
    version: WeightVersion,
    base: BaseVersion | None,
    *,
    transports: Sequence[str] = TRANSPORTS,
    links: LinkSpeeds | None = None,
    bring: Bring | None = None,
) -> Fetched:
    """The payload that makes ``version``, as a delta against ``base`` when the source has one, else in full.

    ``bring`` fills the room for a payload that is not mapped; left out, all of it comes from this source.
    Mapped data (``transport == "mapped"``) keeps the memory of its file until the last view of it is gone.

    Raises:
        InfrastructureError, DeadlineError: the source does not answer.
        VersionUnavailableError: the source does not hold it.
        CorruptDataError: what came is another version than the ledger's, or ends early.
    """
    async with WeightSource(address, run_id, transports=transports, links=links) as source:
        payload = await source.payload(version, base)
        sources: tuple[str, ...] = (address,)
        data = source.mapped(payload)
        if data is None:
            data = receive_buffer(payload.size_bytes)
            sources = await (bring or _bring_whole)(source, payload, data)
        return Fetched(payload=payload, data=data, transport=source.transport, sources=sources)


async def _bring_whole(source: WeightSource, payload: Payload, data: memoryview) -> tuple[str, ...]:
    await fetch_range(source, payload, 0, payload.size_bytes, data)
    return (source.address,)


async def fetch_range(
    source: WeightSource,
    payload: Payload,
    start: int,
    end: int,
    into: memoryview,
    on_received: Callable[[int], None] = lambda offset: None,
) -> None:
    """Bytes ``start`` to ``end`` of a payload into ``into``, which has room for exactly these.

    Streams that break are resumed at their offset. ``on_received`` is told the offset after every piece. Raises as
    ``fetch``; ``NotFoundError`` when the source does not have the payload (any more).
    """
    await source.fetch(payload, ByteRange(start, end, into, on_received))
