"""Interceptors that enforce ``limits`` on peers: on the rate of calls and on their messages.

Messages are parsed here and not by gRPC, which returns UNKNOWN for a message that cannot be parsed, and logs a
traceback: any peer could fill the disk. Here the fault is an error of the peer, returned as such, after all checks that
need no message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common.errors import InvalidRequestError
from services.common.net.hosts import peer_of_grpc
from services.common.rpc.interceptors import CallInterceptor, Context, Handler, written
from services.common.rpc.limits import Limit, Rates, limit_of
from services.common.security.caller import caller

Parse = Callable[[bytes], Any]


def peer_of(context: Context) -> str:
    """The caller at its host; without keys, its host. Never its connection: each new one would have new limits."""
    host, known = peer_of_grpc(str(context.peer())), caller.get()
    # By host: the replicas of a run may share keys, and one machine must not use up the limit of another.
    return host if known is None else f"{known.name}@{host}"


class RateInterceptor(CallInterceptor):
    """Refuses calls over the limits on calls."""

    def __init__(self, rates: Rates | None = None) -> None:
        super().__init__()
        self._rates = rates or Rates()

    def around(self, method: str, context: Context) -> AbstractContextManager[object]:
        name = method.rpartition("/")[2]
        return self._rates.call(peer_of(context), name, limit_of(name))


class MessageInterceptor(CallInterceptor):
    """Parses requests and writes responses within the limits on their size. Comes last, next to the servicer."""

    def _wrap(self, handler: Handler, method: str) -> Handler:
        name = method.rpartition("/")[2]
        limit = limit_of(name)
        read = _reader(name, limit, handler.request_deserializer)
        write = _writer(name, limit, handler.response_serializer)
        if (behaviour := handler.unary_unary) is not None:
            return grpc.unary_unary_rpc_method_handler(_unary(behaviour, read, write))
        if (behaviour := handler.unary_stream) is not None:
            return grpc.unary_stream_rpc_method_handler(_streaming(behaviour, read), response_serializer=write)
        if (behaviour := handler.stream_unary) is not None:
            return grpc.stream_unary_rpc_method_handler(_unary(behaviour, _each(read), write))
        return grpc.stream_stream_rpc_method_handler(
            _streaming(handler.stream_stream, _each(read)), response_serializer=write
        )


def _unary(behaviour: Any, read: Callable[[Any], Any], write: Callable[[Any], bytes]) -> Any:
    async def wrapped(request: Any, context: Context) -> bytes:
        # Serialised here and not by gRPC, so that an answer that is too large becomes a structured error.
        return write(await behaviour(read(request), context))

    return wrapped


def _streaming(behaviour: Any, read: Callable[[Any], Any]) -> Any:
    async def wrapped(request: Any, context: Context) -> None:
        await written(behaviour, read(request), context)

    return wrapped


def _each(read: Callable[[bytes], Any]) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield read(data)

    return parsed


def _reader(name: str, limit: Limit, parse: Parse | None) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        if len(data) > limit.request_bytes:
            raise InvalidRequestError(
                f"a message of {name} has {len(data)} bytes; at most {limit.request_bytes} are taken",
                limit=f"{name}.request_bytes",
            )
        if parse is None:
            return data
        try:
            return parse(data)
        except (DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"a message of {name} cannot be parsed: {error}") from None

    return read


def _writer(name: str, limit: Limit, serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    def write(message: Any) -> bytes:
        data: bytes = serialize(message) if serialize is not None else message
        if len(data) > limit.response_bytes:
            raise InvalidRequestError(
                f"the answer to {name} has {len(data)} bytes; at most {limit.response_bytes} are sent: ask for less",
                limit=f"{name}.response_bytes",
            )
        return data

    return write
