"""The client of a gRPC call, for the queue: what it calls itself, else its connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.rpc.interceptors import CallInterceptor, Context
from services.envgateway.queue.clients import on_behalf_of

CLIENT_KEY = "x-client-id"


class ClientInterceptor(CallInterceptor):
    """Metadata ``x-client-id`` names a client that has several connections; without it each is one."""

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        named = dict(context.invocation_metadata() or ()).get(CLIENT_KEY)
        with on_behalf_of(str(named or context.peer())):
            yield
