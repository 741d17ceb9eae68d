"""Server interceptors: one concern each, over a base class that wraps the four kinds of call once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import structlog

from services.common.errors import MillraceError
from services.common.repeats import Repeats
from services.common.rpc.metadata import ids_from_metadata
from services.common.rpc.status import to_status
from services.common.security.permissions import allowed

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # subscripts in stubs only

_UNARY_RESPONSE = ("unary_unary", "stream_unary")
_STREAM_RESPONSE = ("unary_stream", "stream_stream")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs ``around`` round every call, whatever its kind."""

    def __init__(self) -> None:
        # By method, the handler and how it was wrapped: it is the same at each call, and wrapping it anew would cost more
        # than the wrapper does.
        self._made: dict[str, tuple[Handler, Handler]] = {}

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Before the yield: before the call. After it, or in ``except``: after."""
        yield

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        return self._wrapped(handler, handler_call_details.method)

    def _wrapped(self, handler: Handler, method: str) -> Handler:
        made = self._made.get(method)
        if made is not None and made[0] is handler:
            return made[1]
        wrapped = self._wrap(handler, method)
        if allowed(method):  # a stranger may name any method, and is refused by a handler too
            self._made[method] = (handler, wrapped)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        for kind in (*_UNARY_RESPONSE, *_STREAM_RESPONSE):
            if (behaviour := getattr(handler, kind)) is not None:
                wrap = self._unary if kind in _UNARY_RESPONSE else self._streaming
                make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(wrap(method, behaviour), handler.request_deserializer, handler.response_serializer)
        return handler

    def _unary(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            async with self.around(method, context):
                return await behaviour(request, context)

        return wrapped

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> None:
            async with self.around(method, context):
                await written(behaviour, request, context)

        return wrapped


async def written(behaviour: Any, request: Any, context: Any) -> None:
    """Run a streaming behaviour as a coroutine that writes, not a generator that yields.

    grpc leaves a generator suspended when its call is cancelled; it would be finalised in another task, where
    context variables cannot be restored, at a time of the garbage collector's choosing.
    """
    if not inspect.isasyncgenfunction(behaviour):
        await behaviour(request, context)  # writes to the context itself
        return
    async with aclosing(behaviour(request, context)) as responses:
        async for response in responses:
            await context.write(response)


class ErrorInterceptor(CallInterceptor):
    """Our errors become structured statuses; anything else is a bug: logged with its trace, told as INTERNAL.

    The same refusal is logged once a second, however often it happens: no peer fills the disk with log lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise  # told already
        except grpc.aio.InternalError:
            log.debug("rpc.client_left", method=method)  # in the middle of a write; nobody is there to be told
        except MillraceError as error:
            self._tell(method, error)
            await _abort(method, context, error)
        except Exception:
            # The boundary of the process: the caller must get an answer, and the trace stays here.
            log.exception("rpc.failed", method=method)
            await _abort(method, context, MillraceError("internal error"))

    def _tell(self, method: str, error: MillraceError) -> None:
        # A stranger is refused whatever method it names, and could name another one each time.
        kind = method if allowed(method) else "unknown"
        if (untold := self._repeats.tell(kind, error.reason)) is not None:
            log.info("rpc.refused", method=method, reason=error.reason, error=error.message, **untold)


async def _abort(method: str, context: Context, error: MillraceError) -> None:
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError:
        # The caller left before it could be told. grpc would log this with its trace for everybody who does so.
        log.debug("rpc.client_left", method=method)
        raise asyncio.CancelledError from None


class ContextInterceptor(CallInterceptor):
    """Binds the caller's ids to every log line of the call."""

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        with structlog.contextvars.bound_contextvars(**ids_from_metadata(context.invocation_metadata() or ())):
            yield
