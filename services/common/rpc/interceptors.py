"""Server interceptors: one concern each, over a base class that wraps the four kinds of call once."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from services.common.errors import MillraceError
from services.common.rpc.status import to_status

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs ``around`` round every call, whatever its kind."""

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Before the yield: before the call. After it, or in ``except``: after."""
        yield

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method
        for kind in ("unary_unary", "stream_unary"):
            if (behaviour := getattr(handler, kind)) is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(
                    self._unary(method, behaviour), handler.request_deserializer, handler.response_serializer
                )
        for kind in ("unary_stream", "stream_stream"):
            if (behaviour := getattr(handler, kind)) is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(
                    self._streaming(method, behaviour), handler.request_deserializer, handler.response_serializer
                )
        return handler

    def _unary(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            async with self.around(method, context):
                return await behaviour(request, context)

        return wrapped

    def _streaming(self, method: str, behaviour: Any) -> Any:
        if inspect.isasyncgenfunction(behaviour):

            async def generated(request: Any, context: Context) -> AsyncIterator[Any]:
                async with self.around(method, context):
                    async for response in behaviour(request, context):
                        yield response

            return generated

        async def written(request: Any, context: Context) -> None:
            # A coroutine that writes to the context itself.
            async with self.around(method, context):
                await behaviour(request, context)

        return written


class ErrorInterceptor(CallInterceptor):
    """Our errors become structured statuses; anything else is a bug: logged with its trace, told as INTERNAL."""

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except MillraceError as error:
            log.info("rpc.refused", method=method, reason=error.reason, error=error.message)
            await context.abort_with_status(to_status(error))
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception:
            # The boundary of the process: the caller must get an answer, and the trace stays here.
            log.exception("rpc.failed", method=method)
            await context.abort_with_status(to_status(MillraceError("internal error")))


class ContextInterceptor(CallInterceptor):
    """Binds the caller's ids to every log line of the call."""

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        metadata = dict(context.invocation_metadata() or ())
        ids = {
            name: metadata[key]
            for name, key in (("run", "x-run-id"), ("request", "x-request-id"))
            if key in metadata
        }
        with structlog.contextvars.bound_contextvars(**ids):
            yield
