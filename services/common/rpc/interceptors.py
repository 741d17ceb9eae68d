"""Server interceptors: one concern each, over a base class that wraps the four kinds of call once.

Messages are parsed here and not by gRPC, which returns UNKNOWN for a message that cannot be parsed, and logs a
traceback: any peer could fill the disk. Here the fault is an error of the peer, returned as such, after all checks that
need no message.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from services.common.errors import InvalidRequestError, RollmillError
from services.common.rpc.client import ids_from_metadata, to_status
from services.common.security.identity import allowed
from services.common.telemetry.accounts import AnyActivity, TimeAccount
from services.common.telemetry.logs import LogEvent, Repeats

# --- Limits of messages and connections of gRPC. Independent of gRPC.


KIB, MIB = 1 << 10, 1 << 20
MOST_BYTES = 4 * MIB  # the largest message; larger ones are slower to move, and larger contents are streamed
SMALL_BYTES = 64 * KIB  # the largest request of a method without an entry
REQUEST_BYTES: dict[str, int] = {
    "JoinPool": MIB,
    "StreamReports": MIB,
    "StreamTrajectories": MOST_BYTES,
    "JoinTraining": MIB,
    "ReportTrainer": MIB,
    "PublishVersion": MIB,
    "CreateEpisode": MOST_BYTES,
    "StepEpisode": MOST_BYTES,
    "ExecuteCode": MOST_BYTES,
    "ExecuteCodes": MOST_BYTES,
    "Judge": MOST_BYTES,
    "ComputeReward": MOST_BYTES,
    "ComputeRewards": MOST_BYTES,
}
MOST_REQUESTS = 256  # in one message of ExecuteCodes and ComputeRewards
HANDSHAKE_S = 10.0  # for TLS and HTTP/2's first frames; connections without a call for as long are closed
MOST_CONNECTIONS = 1024  # of one server; more are closed as they come
METADATA_BYTES = 8 * KIB
# A connection's memory is bounded by this times the largest message; calls above it wait at the caller.
STREAMS_PER_CONNECTION = 2048
_SMALL = ("inference", "publisher", "trainer")  # services whose requests are all small


def server_options(service: str) -> list[tuple[str, Any]]:
    """Limits that gRPC itself enforces, before a message is read."""
    return [
        ("grpc.max_receive_message_length", SMALL_BYTES if service in _SMALL else MOST_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ]


log = structlog.get_logger()
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # subscripts in stubs only
_UNARY_RESPONSE = ("unary_unary", "stream_unary")
_STREAM_RESPONSE = ("unary_stream", "stream_stream")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs ``around`` around every call, of any kind."""

    def __init__(self) -> None:
        # By method, the handler and how it was wrapped: it is the same at each call, and wrapping it anew would cost more
        # than the wrapper does.
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def around(self, method: str, context: Context) -> AbstractContextManager[object]:
        """Entered before the call, left after the call. Never waits: an asynchronous one at each interceptor would cost
        a short call more than its handler does."""
        return nullcontext()

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
        if allowed(method):  # unknown methods: a handler refuses an unauthenticated caller too
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
            with self.around(method, context):
                return await behaviour(request, context)

        return wrapped

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> None:
            with self.around(method, context):
                await written(behaviour, request, context)

        return wrapped


class Chain(CallInterceptor):
    """Several interceptors as one, the first outermost: gRPC asks each interceptor anew at every call for its handler, which
    costs a short call as much as its handler does."""

    def __init__(self, interceptors: Sequence[CallInterceptor]) -> None:
        super().__init__()
        self._interceptors = tuple(interceptors)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        for interceptor in reversed(self._interceptors):
            handler = interceptor._wrap(handler, method)
        return handler


async def written(behaviour: Any, request: Any, context: Any) -> None:
    """Run a streaming behaviour as a coroutine that writes, not a generator that yields.

    grpc leaves a generator suspended when its call is cancelled; its finalisation would run in another task, where
    context variables cannot be restored, at a time of the garbage collector's choosing.
    """
    if not inspect.isasyncgenfunction(behaviour):
        await behaviour(request, context)  # writes to the context itself
        return
    async with aclosing(behaviour(request, context)) as responses:
        async for response in responses:
            await context.write(response)


class ErrorInterceptor(CallInterceptor):
    """Converts our errors to structured statuses; any other error is a bug: logged with its traceback, returned as
    INTERNAL.

    The same refusal is logged once a second, so that no peer fills the disk with log lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def _unary(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            return await self._told(behaviour(request, context), method, context)

        return wrapped

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> None:
            await self._told(written(behaviour, request, context), method, context)

        return wrapped

    async def _told(self, call: Awaitable[Any], method: str, context: Context) -> Any:
        """The result of the call; converts its errors to statuses."""
        try:
            return await call
        except grpc.aio.AbortError:
            raise  # told already
        except grpc.aio.InternalError:
            log.debug("rpc.client_left", method=method)  # in the middle of a write; no caller is left for the error
        except RollmillError as error:
            self._tell(method, error)
            await _abort(method, context, error)
        except Exception:
            # The boundary of the process: the caller must get an answer, and the trace stays here.
            log.exception(LogEvent.RPC_FAILED, method=method)
            await _abort(method, context, RollmillError("internal error"))

    def _tell(self, method: str, error: RollmillError) -> None:
        # An unauthenticated caller could name another method each time, so these share one kind.
        kind = method if allowed(method) else "unknown"
        if (untold := self._repeats.tell(kind, error.reason)) is not None:
            log.info("rpc.refused", method=method, reason=error.reason, error=error.message, **untold)


async def _abort(method: str, context: Context, error: RollmillError) -> None:
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError:
        # The caller left before the answer. grpc would log each of these with a traceback.
        log.debug("rpc.client_left", method=method)
        raise asyncio.CancelledError from None


class ContextInterceptor(CallInterceptor):
    """Binds the caller's ids to every log line of the call."""

    def around(self, method: str, context: Context) -> AbstractContextManager[object]:
        return structlog.contextvars.bound_contextvars(**ids_from_metadata(context.invocation_metadata() or ()))


class AccountInterceptor(CallInterceptor):
    """``activities``: the activity of a method ("/package.Service/Method") or a whole service ("/package.Service/").
    Other calls, such as GetStatus, are not booked."""

    def __init__(self, account: TimeAccount, activities: Mapping[str, AnyActivity]) -> None:
        super().__init__()
        self._account = account
        self._activities = activities

    @contextmanager
    def around(self, method: str, context: Context) -> Iterator[None]:
        service = method[: method.rfind("/") + 1]
        name = self._activities.get(method) or self._activities.get(service)
        if name is None:
            yield
            return
        with self._account.during(name):
            yield
        self._account.beat()


class MessageInterceptor(CallInterceptor):
    """Parses requests and writes responses within the limits on their size. Comes last, next to the servicer."""

    def _wrap(self, handler: Handler, method: str) -> Handler:
        name = method.rpartition("/")[2]
        parse, serialize = handler.request_deserializer, handler.response_serializer
        most_bytes = REQUEST_BYTES.get(name, SMALL_BYTES)

        def read(data: bytes) -> Any:
            if len(data) > most_bytes:
                raise InvalidRequestError(f"a message of {name} has {len(data)} bytes; at most {most_bytes} are taken")
            try:
                return parse(data) if parse is not None else data
            except (DecodeError, RecursionError) as error:
                raise InvalidRequestError(f"a message of {name} cannot be parsed: {error}") from None

        def write(message: Any) -> bytes:
            data: bytes = serialize(message) if serialize is not None else message
            if len(data) > MOST_BYTES:
                raise InvalidRequestError(
                    f"the answer to {name} has {len(data)} bytes; at most {MOST_BYTES} are sent: ask for less"
                )
            return data

        async def read_each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield read(data)

        def unary(behaviour: Any, read: Any) -> Any:
            async def wrapped(request: Any, context: Context) -> bytes:
                # Serialised here and not by gRPC, so that an answer that is too large becomes a structured error.
                return write(await behaviour(read(request), context))

            return wrapped

        def streaming(behaviour: Any, read: Any) -> Any:
            async def wrapped(request: Any, context: Context) -> None:
                await written(behaviour, read(request), context)

            return wrapped

        if (behaviour := handler.unary_unary) is not None:
            return grpc.unary_unary_rpc_method_handler(unary(behaviour, read))
        if (behaviour := handler.unary_stream) is not None:
            return grpc.unary_stream_rpc_method_handler(streaming(behaviour, read), response_serializer=write)
        if (behaviour := handler.stream_unary) is not None:
            return grpc.stream_unary_rpc_method_handler(unary(behaviour, read_each))
        return grpc.stream_stream_rpc_method_handler(
            streaming(handler.stream_stream, read_each), response_serializer=write
        )
