"""Authenticates and authorises gRPC calls, before a message is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from services.common.errors import AccessError, InfrastructureError
from services.common.rpc.interceptors import CallInterceptor, Context, Handler, written
from services.common.security.gatekeeper import Gatekeeper, permit
from services.common.security.identity import Caller, Identity, caller

AUTHORIZATION = "authorization"

_CERTIFICATE = "x509_pem_cert"


class AuthInterceptor(CallInterceptor):
    """Refuses calls without a valid certificate or token, or with a role that may not make this call.

    Tokens are checked before a message is read. A stream ends when its caller's credentials expire; a caller that has
    renewed them calls again.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._gatekeeper = Gatekeeper(identity)
        self._clock = identity.clock
        self._by_certificate = identity.bundle.client_certificates

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if self._by_certificate:  # known once the call has a context
            return await super().intercept_service(continuation, handler_call_details)
        try:
            found = self._gatekeeper.identify(_authorization(handler_call_details.invocation_metadata), None)
            permit(found, handler_call_details.method)
        except AccessError as error:
            _refused.set(error)  # the task is the call's own
            return _REFUSAL
        caller.set(found)
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler  # nothing is left to do round a short call
        return self._wrapped(handler, handler_call_details.method)

    def _unary(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            self._identify(method, context)
            return await behaviour(request, context)

        return wrapped

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> None:
            found = self._identify(method, context)
            # Reported like a lost connection: the caller calls again, with renewed credentials or to get the reason.
            ended = InfrastructureError(f"the {found.shown} of this call has expired: call again with a new one")
            ending = _Ending(context, max(0.0, found.ends_at - self._clock()), ended)
            try:
                await written(behaviour, request, ending)
            except asyncio.CancelledError:
                if not ending.cancelled_it():
                    raise
                raise ended from None
            finally:
                ending.over()

        return wrapped

    def _identify(self, method: str, context: Context) -> Caller:
        """The holder of the certificate; the holder of a token is known already."""
        if not self._by_certificate:
            known = caller.get()
            assert known is not None, "set before the handler was looked for"
            return known
        shown = next(iter(context.auth_context().get(_CERTIFICATE, ())), None)
        found = self._gatekeeper.identify(_authorization(context.invocation_metadata()), shown)
        permit(found, method)
        caller.set(found)
        return found


class _Ending:
    """The context of a stream that ends after a time, but never within a write: after a write that was cancelled,
    grpc.aio can send no status any more, and the caller would wait for ever.

    One timer for the stream and two flags for each write: streams carry thousands of messages a second.
    """

    def __init__(self, context: Context, left_s: float, ended: InfrastructureError) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call is a task"
        self._task = task
        self._context = context
        self._ended = ended
        self._writing = False
        self._is_due = False
        self._cancelled = False
        self._timer = asyncio.get_running_loop().call_later(left_s, self._due)

    async def write(self, message: object) -> None:
        self._writing = True
        try:
            await self._context.write(message)
        finally:
            self._writing = False
        if self._is_due:
            raise self._ended

    def _due(self) -> None:
        self._is_due = True
        if not self._writing:
            self._cancelled = True
            self._task.cancel()

    def cancelled_it(self) -> bool:
        """Whether the timer has caused this cancellation."""
        return self._cancelled and self._task.uncancel() == 0

    def over(self) -> None:
        self._timer.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _refuse(requests: object, context: Context) -> None:
    """Fits calls of every kind; reads no message."""
    raise _refused.get()


_refused: ContextVar[AccessError] = ContextVar("refused")
_REFUSAL: Handler = grpc.stream_stream_rpc_method_handler(_refuse)


def _authorization(metadata: Any) -> str | None:
    for key, value in metadata or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
