"""Payload bytes in gRPC chunks: always there. A stream that breaks is opened again at the offset."""

from __future__ import annotations

from typing import Any

import grpc
import structlog

from services.common.aio import deadline
from services.common.errors import CorruptDataError, DeadlineError, InfrastructureError
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.channel import DEADLINES, call_metadata, translated_errors
from services.common.rpc.streams import call_cancellation_is_an_error
from services.common.weights.manifest import Payload
from services.inference.weights.fetch_range import ByteRange

log = structlog.get_logger()

STREAM_ATTEMPTS = 4  # at the same offset, before the transfer counts as failed


class GrpcTransport:
    """``FetchWeights`` of one source."""

    name = "grpc"

    def __init__(self, stub: weights_pb2_grpc.WeightServiceAsyncStub, source: str) -> None:
        self._stub = stub
        self._source = source

    async def fetch(self, payload: Payload, wanted: ByteRange) -> None:
        attempt, began_at = 1, wanted.offset
        while not wanted.is_complete:
            try:
                await self._stream(payload, wanted)
            except (InfrastructureError, DeadlineError) as error:
                log.warning(
                    "weights.stream_broke",
                    source=self._source,
                    offset=wanted.offset,
                    attempt=attempt,
                    error=error.message,
                )
                attempt = attempt + 1 if wanted.offset == began_at else 1
                began_at = wanted.offset
                if attempt > STREAM_ATTEMPTS:
                    raise
                continue
            if not wanted.is_complete:
                raise CorruptDataError(
                    f"{self._source}: payload {payload.payload_id} ended at {wanted.offset} of {wanted.end} bytes"
                )

    async def _stream(self, payload: Payload, wanted: ByteRange) -> None:
        request = weights_pb2.FetchWeightsRequest(payload_id=payload.payload_id, start_offset=wanted.offset)
        if wanted.end != payload.size_bytes:
            request.end_offset = wanted.end
        call = self._stub.FetchWeights(request, metadata=call_metadata())
        try:
            with translated_errors(f"weights at {self._source}"), call_cancellation_is_an_error("FetchWeights"):
                while True:
                    async with deadline(DEADLINES["FetchWeights"], f"the next chunk of weights from {self._source}"):
                        response: Any = await call.read()  # a message, or the mark of the end
                    if response is grpc.aio.EOF:
                        return
                    wanted.put(response.offset, response.data)
        finally:
            call.cancel()
