"""Sets the queue's client of a gRPC call: the name that the call gives, else its connection."""

from __future__ import annotations

from contextlib import AbstractContextManager

from services.common.rpc.interceptors import CallInterceptor, Context
from services.envgateway.queue.local import on_behalf_of

CLIENT_KEY = "x-client-id"


class ClientInterceptor(CallInterceptor):
    """Metadata ``x-client-id`` names a client that has several connections; without the name each connection is a
    client."""

    def around(self, method: str, context: Context) -> AbstractContextManager[object]:
        named = dict(context.invocation_metadata() or ()).get(CLIENT_KEY)
        return on_behalf_of(str(named or context.peer()))
