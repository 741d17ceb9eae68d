"""``WeightService`` over a publisher's store: convert, call, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import OffsetOutOfRangeError, UnknownPolicyError
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.serde_weights import payload_to_proto
from services.common.weights.manifest import BaseVersion
from services.trainer.publisher_store import PublisherStore

CHUNK_BYTES = 1 << 20  # larger messages are slower over gRPC

Context = grpc.aio.ServicerContext[Any, Any]


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Serves one policy."""

    def __init__(self, store: PublisherStore, policy: str) -> None:
        self._store = store
        self._policy = policy
        self.num_bytes_sent = 0

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        if request.policy != self._policy:
            raise UnknownPolicyError(f"this publisher serves {self._policy!r}, not {request.policy!r}")
        base = None
        if request.HasField("base_version"):
            base = BaseVersion(number=request.base_version, digest=request.base_digest)
        # In a thread: a delta of a large model takes seconds to encode, and others are being served.
        payload = await asyncio.to_thread(self._store.payload, request.run_id, request.version, base)
        return payload_to_proto(payload)

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: Context
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        with self._store.reading(request.payload_id) as data:
            size = len(data)
            if not 0 <= request.start_offset <= size:
                raise OffsetOutOfRangeError(f"offset {request.start_offset} of a payload of {size} bytes")
            for offset in range(request.start_offset, size, CHUNK_BYTES):
                chunk = bytes(data[offset : offset + CHUNK_BYTES])
                self.num_bytes_sent += len(chunk)
                yield weights_pb2.FetchWeightsResponse(
                    offset=offset, remaining_bytes=size - offset - len(chunk), data=chunk
                )
