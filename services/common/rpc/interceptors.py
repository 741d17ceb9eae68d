"""What a server does around every call, in one interceptor: who calls, the limits of messages, errors as statuses, logs.

Messages are parsed here and not by gRPC, which returns UNKNOWN for a message that cannot be parsed, and logs a
traceback: any peer could fill the disk. Here the fault is an error of the peer, returned as such, after all checks that
need no message.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from services.common.errors import AccessError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.rpc.client import ids_from_metadata, to_status
from services.common.security.identity import (
    MOST_BYTES,
    REQUEST_BYTES,
    SMALL_BYTES,
    Identity,
    allowed,
    caller,
    permit,
)
from services.common.security.keys import Holder
from services.common.telemetry.accounts import AnyActivity, TimeAccount
from services.common.telemetry.logs import LogEvent, Repeats

if TYPE_CHECKING:
    from services.common.security.gatekeeper import Gatekeeper

# --- Limits of messages and connections of gRPC. Independent of gRPC.


HANDSHAKE_S = 10.0  # for TLS and HTTP/2's first frames; connections without a call for as long are closed
MOST_CONNECTIONS = 1024  # of one server; more are closed as they come
METADATA_BYTES = 8 << 10
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
Around = Callable[[str, Context], AbstractContextManager[object]]
"""Entered with a method ("/package.Service/Method") before its call, left after it. Never waits: an asynchronous one would
cost a short call more than its handler does."""

AUTHORIZATION = "authorization"
_CERTIFICATE = "x509_pem_cert"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """One for all concerns: gRPC asks each interceptor anew at every call for its handler, which costs a short call as much
    as its handler does.

    With an identity, refuses calls without a valid certificate or token, or with a role that may not make this call. Tokens
    are checked before a message is read. A stream ends when its caller's credentials expire; a caller that has renewed them
    calls again.

    Our errors become structured statuses; any other error is a bug: logged with its traceback, returned as INTERNAL. The same
    refusal is logged once a second, so that no peer fills the disk with log lines.
    """

    def __init__(self, who: Identity | None = None, around: Sequence[Around] = ()) -> None:
        # By method, the handler and how it was wrapped: it is the same at each call, and wrapping it anew would cost more
        # than the wrapper does.
        self._made: dict[str, tuple[Handler, Handler]] = {}
        self._around = tuple(around)
        self._repeats = Repeats()
        self._who = who
        self._gatekeeper: Gatekeeper | None = None
        if who is not None:
            from services.common.security.gatekeeper import Gatekeeper  # and cryptography: for those with keys only

            self._gatekeeper = Gatekeeper(who)
        # Else known once the call has a context.
        self._by_token = who is not None and not who.bundle.client_certificates

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        if self._by_token:
            try:
                self._identify(method, handler_call_details.invocation_metadata, None)  # the task is the call's own
            except AccessError as error:
                return self._refusal(method, error)
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        made = self._made.get(method)
        if made is not None and made[0] is handler:
            return made[1]
        wrapped = self._wrap(handler, method)
        if allowed(method):  # unknown methods: a handler refuses an unauthenticated caller too
            self._made[method] = (handler, wrapped)
        return wrapped

    def _refusal(self, method: str, error: AccessError) -> Handler:
        """Fits calls of every kind; reads no message."""

        async def refuse(requests: object, context: Context) -> None:
            with structlog.contextvars.bound_contextvars(**ids_from_metadata(context.invocation_metadata() or ())):
                await self._refuse(method, context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _identify(self, method: str, metadata: Any, certificate: bytes | None) -> Holder:
        """Raises ``AccessError``."""
        assert self._gatekeeper is not None, "asked with an identity only"
        found = self._gatekeeper.identify(dict(metadata or ()).get(AUTHORIZATION), certificate)
        permit(found, method)
        caller.set(found)
        return found

    def _caller_of(self, method: str, context: Context) -> Holder | None:
        """The holder of the certificate; the holder of a token is known already."""
        if self._who is None or self._by_token:
            return caller.get()
        shown = next(iter(context.auth_context().get(_CERTIFICATE, ())), None)
        return self._identify(method, context.invocation_metadata(), shown)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        read, write = _message_limits(handler, method)

        async def read_each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield read(data)

        take: Any = read_each if handler.request_streaming else read

        async def unary(request: Any, context: Context, _: Holder | None) -> bytes:
            # Serialised here and not by gRPC, so that an answer that is too large becomes a structured error.
            return write(await behaviour(take(request), context))

        async def streaming(request: Any, context: Context, found: Holder | None) -> None:
            if self._who is None or found is None:
                await _written(behaviour, take(request), context)
                return
            # Reported like a lost connection: the caller calls again, with renewed credentials or to get the reason.
            ended = InfrastructureError(f"the {found.shown} of this call has expired: call again with a new one")
            ending = _Ending(context, max(0.0, found.ends_at - self._who.clock()), ended)
            try:
                await _written(behaviour, take(request), ending)
            except asyncio.CancelledError:
                if not ending.cancelled_it():
                    raise
                raise ended from None
            finally:
                ending.over()

        inner: Any = streaming if handler.response_streaming else unary

        async def answered(request: Any, context: Context) -> Any:
            # The caller's ids are on every log line of the call.
            with structlog.contextvars.bound_contextvars(**ids_from_metadata(context.invocation_metadata() or ())):
                try:
                    found = self._caller_of(method, context)
                    with ExitStack() as entered:
                        for each in self._around:
                            entered.enter_context(each(method, context))
                        return await inner(request, context, found)
                except grpc.aio.AbortError:
                    raise  # told already
                except grpc.aio.InternalError:
                    log.debug(
                        "rpc.client_left", method=method
                    )  # in the middle of a write; nobody is left for the error
                except RollmillError as error:
                    await self._refuse(method, context, error)
                except Exception:
                    # The boundary of the process: the caller must get an answer, and the trace stays here.
                    log.exception(LogEvent.RPC_FAILED, method=method)
                    await _abort(method, context, RollmillError("internal error"))

        kind = f"{_KIND[handler.request_streaming]}_{_KIND[handler.response_streaming]}"
        make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answered, response_serializer=write if handler.response_streaming else None)

    async def _refuse(self, method: str, context: Context, error: RollmillError) -> None:
        # An unauthenticated caller could name another method each time, so these share one kind.
        kind = method if allowed(method) else "unknown"
        if (untold := self._repeats.tell(kind, error.reason)) is not None:
            log.info("rpc.refused", method=method, reason=error.reason, error=error.message, **untold)
        await _abort(method, context, error)


_KIND = {False: "unary", True: "stream"}


def booked(account: TimeAccount, activities: Mapping[str, AnyActivity]) -> Around:
    """``activities``: the activity of a method ("/package.Service/Method") or a whole service ("/package.Service/").
    Other calls, such as GetStatus, are not booked."""

    @contextmanager
    def around(method: str, _: Context) -> Iterator[None]:
        name = activities.get(method) or activities.get(method[: method.rfind("/") + 1])
        if name is None:
            yield
            return
        with account.during(name):
            yield
        account.beat()

    return around


def _message_limits(handler: Handler, method: str) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    """Reads requests and writes responses of a method within the limits on their size."""
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

    return read, write


async def _written(behaviour: Any, request: Any, context: Any) -> None:
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


async def _abort(method: str, context: Context, error: RollmillError) -> None:
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError:
        # The caller left before the answer. grpc would log each of these with a traceback.
        log.debug("rpc.client_left", method=method)
        raise asyncio.CancelledError from None


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
