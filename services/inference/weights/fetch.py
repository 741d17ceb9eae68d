"""Fetching a payload over ``WeightService``: manifest, then chunks, resumed at the offset when a stream breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from services.common.aio import deadline
from services.common.errors import BaseUnavailableError, CorruptDataError, DeadlineError, InfrastructureError
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.channel import DEADLINES, call_metadata, channel, translated_errors
from services.common.rpc.streams import call_cancellation_is_an_error
from services.common.serde_weights import payload_from_proto
from services.common.types import WeightVersion
from services.common.weights.manifest import BaseVersion, Encoding, Payload

log = structlog.get_logger()

STREAM_ATTEMPTS = 4  # at the same offset, before the transfer counts as failed


async def fetch(
    source: str, run_id: str, version: WeightVersion, base: BaseVersion | None
) -> tuple[Payload, memoryview]:
    """The payload that makes ``version``, as a delta against ``base`` when the source has one, else in full.

    Raises:
        InfrastructureError, DeadlineError: the source does not answer.
        VersionUnavailableError: the source does not hold it.
        CorruptDataError: what came is another version than the ledger's, or ends early.
    """
    async with channel(source) as connection:
        stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(connection)
        payload = await _manifest(stub, source, run_id, version, base)
        if payload.target.digest != version.digest or payload.target.version != version.number:
            raise CorruptDataError(
                f"{source} offers version {payload.target.version} with digest {payload.target.digest}, "
                f"the ledger says {version.number} with {version.digest}"
            )
        if payload.encoding is Encoding.DELTA and payload.base != base:
            raise CorruptDataError(f"{source} offers a delta from {payload.base}, this replica holds {base}")
        return payload, await _chunks(stub, source, payload)


async def _manifest(
    stub: weights_pb2_grpc.WeightServiceAsyncStub,
    source: str,
    run_id: str,
    version: WeightVersion,
    base: BaseVersion | None,
) -> Payload:
    request = weights_pb2.GetManifestRequest(
        run_id=run_id,
        policy=version.policy,
        version=version.number,
        base_version=base.number if base else None,
        base_digest=base.digest if base else "",
    )
    try:
        with translated_errors(f"weights at {source}"):
            return payload_from_proto(
                await stub.GetManifest(request, timeout=DEADLINES["GetManifest"], metadata=call_metadata(run_id))
            )
    except BaseUnavailableError:
        if base is None:
            raise
        return await _manifest(stub, source, run_id, version, None)


@dataclass(slots=True)
class _Received:
    """What came so far; it outlives the stream that brought it."""

    buffer: bytearray
    offset: int = 0


async def _chunks(stub: weights_pb2_grpc.WeightServiceAsyncStub, source: str, payload: Payload) -> memoryview:
    received = _Received(bytearray(payload.size_bytes))
    for attempt in range(1, STREAM_ATTEMPTS + 1):
        try:
            await _stream(stub, source, payload, received)
        except (InfrastructureError, DeadlineError) as error:
            log.warning(
                "weights.stream_broke", source=source, offset=received.offset, attempt=attempt, error=error.message
            )
            if attempt == STREAM_ATTEMPTS:
                raise
            continue
        if received.offset != payload.size_bytes:
            raise CorruptDataError(
                f"{source}: payload {payload.payload_id} ended at {received.offset} of {payload.size_bytes} bytes"
            )
        break
    return memoryview(received.buffer)


async def _stream(
    stub: weights_pb2_grpc.WeightServiceAsyncStub, source: str, payload: Payload, received: _Received
) -> None:
    call = stub.FetchWeights(
        weights_pb2.FetchWeightsRequest(payload_id=payload.payload_id, start_offset=received.offset),
        metadata=call_metadata(),
    )
    try:
        with translated_errors(f"weights at {source}"), call_cancellation_is_an_error("FetchWeights"):
            while True:
                async with deadline(DEADLINES["FetchWeights"], f"the next chunk of weights from {source}"):
                    response: Any = await call.read()  # a message, or the mark of the end
                if response is grpc.aio.EOF:
                    return
                end = received.offset + len(response.data)
                if response.offset != received.offset or end > len(received.buffer):
                    raise CorruptDataError(
                        f"{source}: a chunk at {response.offset} came where {received.offset} was due"
                    )
                received.buffer[received.offset : end] = response.data
                received.offset = end
    finally:
        call.cancel()
