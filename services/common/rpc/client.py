"""Client channels: keepalive, retries where repeating is safe, ids in the metadata, explicit deadlines, the peer's errors.

Deadlines are arguments of each call (``timeout=DEADLINES["GetRun"]``): the reader and the server see the longest
duration. (A timeout in the service config fires early and the server sees none.)

The ids join the logs of two processes: the ``run`` and ``request`` that the caller has bound to its logs
(``services.common.telemetry.logs.bind``). The server binds them for as long as the call lasts, so a call made on behalf of a
call carries the same request id.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from services.common import errors
from services.common.errors import AccessError, ConfigError, DeadlineError, InfrastructureError, RollmillError
from services.common.security import identity
from services.common.security.identity import Identity, refusal
from services.common.security.keys import SERVICES, Bundle, Peer, Role

# --- TLS credentials for gRPC servers and channels, from an identity, and a synchronous channel with them.


# Services reach each other at their own addresses; a proxy of the environment is for the outside.
DIRECT = ("grpc.enable_http_proxy", 0)


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """The identity's certificate; a renewed one is used from the next handshake on."""
    served = identity.bundle

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        fresh = identity.bundle
        if fresh is served:
            return None
        served = fresh
        return _configuration(fresh)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        renewed,  # type: ignore[arg-type]  # None: nothing has changed
        require_client_authentication=served.client_certificates,
    )


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """Trusts the run's authority only; presents the identity's certificate on request."""
    held = identity.bundle
    return grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)


def channel_options(peer: Peer) -> list[tuple[str, str]]:
    """The peer's certificate must have the name of the called service, at any address."""
    return [("grpc.ssl_target_name_override", peer.dns_name)]


def _configuration(held: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.ca)


def sync_channel(address: str, peer: Peer = Peer.MEMBER) -> grpc.Channel:
    """Like ``services.common.rpc.client.channel``, without asyncio and without retries."""
    who = identity.current()
    if who is None:
        return grpc.insecure_channel(address, options=[DIRECT])
    credentials = grpc.composite_channel_credentials(
        channel_credentials(who), grpc.access_token_call_credentials(who.bundle.token)
    )
    return grpc.secure_channel(address, credentials, options=[DIRECT, *channel_options(peer)])


# --- Errors as gRPC statuses and back, from one table.


DOMAIN = "rollmill"
MESSAGE_BYTES = 1200  # sent twice, once as percent-encoded text
METADATA_VALUE_BYTES = 200
Code = grpc.StatusCode

# Of the tree in services.common.errors; a class without a row has the status of its base.
STATUS_OF: dict[type[RollmillError], grpc.StatusCode] = {
    errors.RollmillError: Code.INTERNAL,
    errors.UserError: Code.INVALID_ARGUMENT,
    errors.UnauthenticatedError: Code.UNAUTHENTICATED,
    errors.PermissionDeniedError: Code.PERMISSION_DENIED,
    errors.NotFoundError: Code.NOT_FOUND,
    errors.StateError: Code.FAILED_PRECONDITION,
    errors.OffsetOutOfRangeError: Code.OUT_OF_RANGE,
    errors.SupersededError: Code.ABORTED,
    errors.CapacityError: Code.RESOURCE_EXHAUSTED,
    errors.CorruptDataError: Code.DATA_LOSS,
    errors.DeadlineError: Code.DEADLINE_EXCEEDED,
    errors.RolloutTimeoutError: Code.DEADLINE_EXCEEDED,
    errors.InfrastructureError: Code.UNAVAILABLE,
}
# Of two classes with one reason the leaf.
CLASS_OF_REASON = {
    cls.reason: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, RollmillError) and cls not in (errors.UserError, AccessError)
}
# A status without our details comes from the transport. A server of ours adds details even to its bugs, so
# UNKNOWN ("Stream removed") and INTERNAL (RST_STREAM, a forwarder's answer) are a connection that broke in mid-call.
CLASS_OF_BARE_STATUS: dict[grpc.StatusCode, type[RollmillError]] = {
    Code.UNAVAILABLE: InfrastructureError,
    Code.CANCELLED: InfrastructureError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
    Code.UNKNOWN: InfrastructureError,
    Code.INTERNAL: InfrastructureError,
}


def to_status(error: RollmillError) -> grpc.Status:
    """The status of this error."""
    code = next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)
    metadata = {key: _cut(str(value), METADATA_VALUE_BYTES) for key, value in error.metadata.items()}
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    message = _cut(error.message, MESSAGE_BYTES)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=details))
    return status


def from_call(error: grpc.RpcError, peer: str) -> RollmillError:
    """The error of a failed call, as the class that the other side raised."""
    status = _details(error)
    if status is not None:
        info, retry_after_s = error_details_pb2.ErrorInfo(), None
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                detail.Unpack(info)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        if info.domain == DOMAIN and info.reason in CLASS_OF_REASON:
            told = CLASS_OF_REASON[info.reason](status.message, retry_after_s=retry_after_s)
            told.metadata = dict(info.metadata)  # not as keywords: the peer chooses these names
            return told
    called = isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code = error.code() if called else Code.UNKNOWN
    message = (error.details() if called else None) or str(error)
    return CLASS_OF_BARE_STATUS.get(code, RollmillError)(f"{peer}: {code.name}: {message}")


def _details(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except ValueError:  # the details contradict the status: not ours
        return None


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, size_bytes: int) -> str:
    encoded = text.encode(errors="replace")  # a message carries no lone surrogates
    if len(encoded) <= size_bytes:
        return encoded.decode()
    return encoded[:size_bytes].decode(errors="ignore") + "..."


_KEYS = {"run": "x-run-id", "request": "x-request-id"}

REPORT_ANSWER_S = 5.0

KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def fixed_window(num_bytes: int) -> list[tuple[str, Any]]:
    """So many bytes of a stream may wait at their receiver to be read.

    gRPC would find the number by probes: a ping and its answer at most messages of a connection that is used seldom.
    With a thousand replicas these were more than half of what the orchestrator sent.
    """
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", num_bytes)]


# Of the orchestrator's messages to one member: batches are large, and 4 MiB at a delay of 0.1 s are 40 MB/s.
MEMBER_WINDOW = fixed_window(4 << 20)


def with_ids(metadata: Iterable[tuple[str, Any]] | None = None, run_id: str = "") -> tuple[tuple[str, Any], ...]:
    """The metadata of a call; missing ids come from the logs' context, and a missing request id is created."""
    given = tuple(metadata or ())
    bound, present = structlog.contextvars.get_contextvars(), {key for key, _ in given}
    ids = {"run": run_id or str(bound.get("run", "")), "request": str(bound.get("request", "")) or uuid.uuid4().hex}
    # HTTP/2 refuses other characters, and a call must not fail for the sake of its log lines.
    return given + tuple(
        (_KEYS[name], value)
        for name, value in ids.items()
        if value and value.isascii() and value.isprintable() and _KEYS[name] not in present
    )


def ids_from_metadata(metadata: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """The ids by the names under which logs know them."""
    found = dict(metadata)
    return {name: found[key] for name, key in _KEYS.items() if key in found}


def channel(address: str, peer: Peer = Peer.MEMBER, run_id: str = "") -> ServiceChannel:
    """A channel to a service; connects on first use and reconnects by itself. ``run_id``: where the logs have none.

    A process with keys (``services.common.security.identity``) speaks TLS, and only to a ``peer`` of its run.
    """
    return ServiceChannel(address, peer, identity.current(), run_id)


class ServiceChannel(grpc.aio.Channel):
    """Puts the caller's ids, and its token if it has keys, on every call. After a renewal of the keys new calls take a
    connection made with the new ones; calls that run go on with the old. All else is the wrapped channel's.

    Not client interceptors: grpc.aio gives each intercepted call a task and a queue of its own.
    """

    def __init__(self, address: str, peer: Peer, who: identity.Identity | None, run_id: str = "") -> None:
        self.address = address
        self.peer = peer
        self.who = who
        self.run_id = run_id
        self._generation = 0 if who is None else who.generation
        self._shown: tuple[tuple[str, str], ...] = ()
        self._older: list[grpc.aio.Channel] = []
        self._wrapped = self._connect()

    def _connect(self) -> grpc.aio.Channel:
        # Weights need what the line can carry.
        options = [*_OPTIONS, *(MEMBER_WINDOW if self.peer is Peer.ORCHESTRATOR else ())]
        if self.who is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        self._shown = (("authorization", f"Bearer {self.who.bundle.token}"),)
        options += channel_options(self.peer)
        return grpc.aio.secure_channel(self.address, channel_credentials(self.who), options=options)

    async def __aenter__(self) -> ServiceChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for each in (*self._older, self._wrapped):
            await each.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._wrapped.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._wrapped.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._wrapped.channel_ready()

    def _called(self, kind: str, *made_with: Any, **options: Any) -> Any:
        through = self._wrapped
        call = getattr(through, kind)(*made_with, **options)

        def called(*arguments: Any, metadata: Any = None, **keywords: Any) -> Any:
            nonlocal through, call
            if self.who is not None:
                self._follow_renewals(self.who)
            if through is not self._wrapped:
                through = self._wrapped
                call = getattr(through, kind)(*made_with, **options)
            return call(*arguments, metadata=(*with_ids(metadata, self.run_id), *self._shown), **keywords)

        return called

    unary_unary = partialmethod(_called, "unary_unary")
    unary_stream = partialmethod(_called, "unary_stream")
    stream_unary = partialmethod(_called, "stream_unary")
    stream_stream = partialmethod(_called, "stream_stream")

    def _follow_renewals(self, who: identity.Identity) -> None:
        _ = who.bundle  # looks for renewed files
        if self._generation != who.generation:
            self._generation = who.generation
            self._older.append(self._wrapped)
            self._wrapped = self._connect()


@contextmanager
def translated_errors(peer: str, stream: str = "") -> Iterator[None]:
    """Raise the peer's error instead of ``grpc.RpcError``; ``peer`` names the peer in messages.

    ``stream`` names the call whose stream the body reads. grpc.aio confuses the cancellation of such a call with that of
    the task that reads; here the two are told apart:

    * The server ended the call with CANCELLED, as one that stops does: ``InfrastructureError``, although grpc.aio raises
      ``CancelledError``, which would end a loop that should reconnect.
    * The task was cancelled: ``CancelledError``, also where the call failed at the same moment. grpc.aio then raises the
      call's error only, and a loop that reconnects would never end.
    """
    task = asyncio.current_task() if stream else None
    before = 0 if task is None else task.cancelling()
    try:
        yield
    except grpc.RpcError as error:
        was_cancelled = task is not None and task.cancelling() > before
        raise (asyncio.CancelledError() if was_cancelled else from_call(error, peer)) from None
    except asyncio.CancelledError:
        if task is None or task.cancelling() > before:
            raise
        raise InfrastructureError(f"{stream}: the call was cancelled") from None


def _service_config() -> str:
    names = [{"service": service, "method": name} for service, methods in identity.RPCS.items()
             for name, rpc in methods.items() if rpc.is_retried]  # fmt: skip
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "waitForReady": True, "retryPolicy": policy}]})


_OPTIONS: list[tuple[str, Any]] = [
    DIRECT,
    *KEEPALIVE,
    ("grpc.service_config", _service_config()),
    ("grpc.enable_retries", 1),
    # A restarted peer is found within a second or two, not after the default of minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


# --- Asks a service whether it is ready; ``python -m services.common.rpc.client HOST:PORT`` exits with 0 when
# ready.


HEALTH_DEADLINE_S = 2.0


def is_serving(address: str) -> bool:
    """Whether the health service at ``HOST:PORT`` says SERVING within ``HEALTH_DEADLINE_S``."""
    with sync_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def identify() -> None:
    """Ask with the keys that ``ROLLMILL_KEYS`` names, of any role. Raises ``ConfigError`` for unusable ones."""
    identity.configure(*sorted(SERVICES, key=lambda role: role.value), Role.OPERATOR, Role.VIEWER)


def main(arguments: list[str]) -> int:
    """0: every address says SERVING; 1: one does not; 2: no address was given, or the keys cannot be used."""
    if not arguments:
        sys.stderr.write("usage: python -m services.common.rpc.client HOST:PORT ...\n")
        return 2
    try:
        identify()
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    silent = [address for address in arguments if not is_serving(address)]
    sys.stderr.writelines(f"{address} does not say SERVING\n" for address in silent)
    return 1 if silent else 0


# --- Distinguishes a peer that is down, and may come back, from one that the keys separate from us for ever.


LOOK_EVERY_S = 5.0
_looked_at: dict[str, float] = {}


async def refusal_behind(error: RollmillError, connection: grpc.aio.Channel) -> AccessError | None:
    """The refusal of which a failed call is the consequence: wrong, expired or missing keys on either side.

    None when there is none, and for calls that fail within ``LOOK_EVERY_S`` of a look at the same address.
    """
    if isinstance(error, AccessError):
        return error
    if not isinstance(error, InfrastructureError | DeadlineError) or not isinstance(connection, ServiceChannel):
        return None
    now = time.monotonic()
    if now - _looked_at.get(connection.address, -LOOK_EVERY_S) < LOOK_EVERY_S:
        return None
    _looked_at[connection.address] = now
    return await asyncio.to_thread(refusal, connection.address, connection.who, connection.peer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
