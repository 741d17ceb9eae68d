"""``WeightService`` and its bulk socket over one or several ``PayloadSource``s, by policy: convert, call, convert.

Used by publishers (their store) and by replicas that relay. The manifest offers the other transports of the receiver
beside gRPC chunks: a mapped file or the bulk socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import grpc

from services.common.errors import NotFoundError, OffsetOutOfRangeError, UnknownPolicyError
from services.common.net.hosts import host_identity
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.server import Server
from services.common.transfer.bulk import BulkServer, PayloadSource, SendBudget
from services.common.weights.snapshot import PayloadNotReadyError, PayloadRequest
from services.common.wire import read, write

Context = grpc.aio.ServicerContext[Any, Any]


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Serves ``sources``, by policy; policies may be added and removed while the servicer runs."""

    def __init__(
        self, sources: Mapping[str, PayloadSource], budget: SendBudget | None = None, bulk: BulkServer | None = None
    ) -> None:
        self._sources = sources
        self._bulk = bulk
        self.budget = budget if budget is not None else SendBudget()

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        source = self._sources.get(request.policy)
        if source is None:
            raise UnknownPolicyError(f"served here: {sorted(self._sources)}; not {request.policy!r}")
        # In a thread: a delta of a large model takes seconds to encode, and others are being served.
        asked = read(PayloadRequest, request)
        can_map = "mapped" in asked.transports and bool(asked.host) and asked.host == host_identity()
        response = weights_pb2.GetManifestResponse()
        try:
            payload = await asyncio.to_thread(source.payload, replace(asked, can_map=can_map))
        except PayloadNotReadyError as error:
            response.not_ready.started, response.not_ready.size_bytes = error.started, error.size_bytes
            return response
        write(payload, response.payload)
        if can_map and payload.file is not None:  # gone meanwhile, the receiver asks for another transport
            response.mapped.path, response.mapped.offset = str(payload.file[0]), payload.file[1]
        if "bulk" in asked.transports and self._bulk is not None and payload.size_bytes >= self._bulk.from_bytes:
            response.bulk.endpoint = self._bulk.endpoint
            response.bulk.ticket = self._bulk.tickets.give(source, payload.payload_id)
            response.bulk.server_key = self._bulk.public_key
        return response

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: Context
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        reader = source_of(request.payload_id, self._sources).open(request.payload_id)
        try:
            size = reader.size_bytes
            end = request.end_offset if request.HasField("end_offset") else size
            offset = request.start_offset
            if not 0 <= offset <= end <= size:
                raise OffsetOutOfRangeError(f"bytes {offset} to {end} of a payload of {size} bytes")
            while offset < end:
                data = await reader.read(offset, min(end - offset, self.budget.chunk_bytes))
                await self.budget.take(len(data))
                yield weights_pb2.FetchWeightsResponse(
                    offset=offset, remaining_bytes=end - offset - len(data), data=bytes(data)
                )
                offset += len(data)
        finally:
            reader.close()


async def add_weight_service(
    server: Server, sources: Mapping[str, PayloadSource], *, send_bytes_per_s: float = 0.0, bulk_wanted: bool = True
) -> WeightServicer:
    """Serve these sources, by policy, within one send budget. Call before ``server.start``; stops with the server."""
    budget = SendBudget(send_bytes_per_s)
    bulk = None
    if bulk_wanted:  # else the recipe's transports leave it out, and no socket is opened
        host = "127.0.0.1" if server.host == "localhost" else server.host
        bulk = BulkServer(budget, host=host, encrypted=server.identity is not None)
        await bulk.start()
        server.on_stop(bulk.stop)
    servicer = WeightServicer(sources, budget, bulk)
    server.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, servicer, "rollmill.v1.WeightService")
    return servicer


def source_of(payload_id: str, sources: Mapping[str, PayloadSource]) -> PayloadSource:
    """The source of a payload: a payload's name begins with its policy's."""
    found = max((policy for policy in sources if payload_id.startswith(f"{policy}:")), key=len, default=None)
    if found is None:
        raise NotFoundError(f"payload {payload_id!r} is of none of {sorted(sources)}: ask for the manifest again")
    return sources[found]
