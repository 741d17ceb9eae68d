"""Puts ``WeightService`` and its bulk socket on a server: what a publisher and a relay do alike."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.pb import weights_pb2_grpc
from services.common.rpc.server import Server
from services.common.transfer.bulk_server import BulkServer
from services.common.transfer.sending import SendBudget
from services.common.transfer.servicer import WeightServicer
from services.common.transfer.source import PayloadSource


async def add_weight_service(
    server: Server, sources: Mapping[str, PayloadSource], *, send_bytes_per_s: float = 0.0, bulk_wanted: bool = True
) -> WeightServicer:
    """Serve these sources, by policy, within one send budget. Call it before ``server.start``; it stops with the server."""
    budget = SendBudget(send_bytes_per_s)
    bulk = None
    if not bulk_wanted:
        pass  # the recipe's transports leave it out: no socket is opened
    else:
        host = "127.0.0.1" if server.host == "localhost" else server.host
        bulk = BulkServer(budget, host=host, encrypted=server.identity is not None)
        await bulk.start()
        server.on_stop(bulk.stop)
    servicer = WeightServicer(sources, budget, bulk)
    server.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, servicer, "millrace.v1.WeightService")
    return servicer
