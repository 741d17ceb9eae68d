"""The metadata of calls: the ids that join the logs of two processes, and errors as gRPC statuses and back.

The ids are the ``run`` and ``request`` that the caller has bound to its logs (``services.common.telemetry.logs.bind``); the
server binds them for as long as the call lasts, so a call made on behalf of a call carries the same request id.

Errors and statuses come from one table. On the wire: ``google.rpc.Status`` with one ``ErrorInfo{reason, domain "millrace",
metadata}``, plus ``RetryInfo`` where waiting helps. The error travels in the trailing metadata, where HTTP/2 peers refuse
more than 8 KiB, so long texts are cut: the caller must get the right error with half of a message, not another error with
none.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.errors import DeadlineError, InfrastructureError, MillraceError

Metadata = tuple[tuple[str, str], ...]

_KEYS = {"run": "x-run-id", "request": "x-request-id"}

DOMAIN = "millrace"
MESSAGE_BYTES = 1200  # sent twice, once as percent-encoded text
METADATA_VALUE_BYTES = 200
Code = grpc.StatusCode

# Most specific last: every leaf of the tree in services.common.errors has one row.
STATUS_OF: dict[type[MillraceError], grpc.StatusCode] = {
    errors.MillraceError: Code.INTERNAL,
    errors.InvalidRequestError: Code.INVALID_ARGUMENT,
    errors.ConfigError: Code.INVALID_ARGUMENT,
    errors.DatasetError: Code.INVALID_ARGUMENT,
    errors.PromptTooLongError: Code.INVALID_ARGUMENT,
    errors.UnknownPolicyError: Code.INVALID_ARGUMENT,
    errors.ModelMismatchError: Code.INVALID_ARGUMENT,
    errors.UnauthenticatedError: Code.UNAUTHENTICATED,
    errors.PermissionDeniedError: Code.PERMISSION_DENIED,
    errors.NotFoundError: Code.NOT_FOUND,
    errors.UnknownTaskGroupError: Code.NOT_FOUND,
    errors.EpisodeNotFoundError: Code.NOT_FOUND,
    errors.UnknownEnvironmentError: Code.NOT_FOUND,
    errors.StateError: Code.FAILED_PRECONDITION,
    errors.LeaseLostError: Code.FAILED_PRECONDITION,
    errors.WeightsStaleError: Code.FAILED_PRECONDITION,
    errors.VersionConflictError: Code.FAILED_PRECONDITION,
    errors.VersionUnavailableError: Code.FAILED_PRECONDITION,
    errors.BaseUnavailableError: Code.FAILED_PRECONDITION,
    errors.SandboxRefusedError: Code.FAILED_PRECONDITION,
    errors.OffsetOutOfRangeError: Code.OUT_OF_RANGE,
    errors.SupersededError: Code.ABORTED,
    errors.CapacityError: Code.RESOURCE_EXHAUSTED,
    errors.CorruptDataError: Code.DATA_LOSS,
    errors.BatchLostError: Code.DATA_LOSS,
    errors.DeadlineError: Code.DEADLINE_EXCEEDED,
    errors.RolloutTimeoutError: Code.DEADLINE_EXCEEDED,
    errors.InfrastructureError: Code.UNAVAILABLE,
    errors.GraderFailedError: Code.UNAVAILABLE,
}
CLASS_OF_REASON: dict[str, type[MillraceError]] = {cls.reason: cls for cls in STATUS_OF}
# A status without our details comes from the transport. A server of ours adds details even to its bugs, so
# UNKNOWN ("Stream removed") and INTERNAL (RST_STREAM, a forwarder's answer) are a connection that broke in mid-call.
CLASS_OF_BARE_STATUS: dict[grpc.StatusCode, type[MillraceError]] = {
    Code.UNAVAILABLE: InfrastructureError,
    Code.CANCELLED: InfrastructureError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
    Code.UNKNOWN: InfrastructureError,
    Code.INTERNAL: InfrastructureError,
}


def call_metadata(run_id: str = "", request_id: str = "") -> Metadata:
    """Metadata of one call; missing ids come from the logs' context, and a missing request id is created."""
    bound = structlog.contextvars.get_contextvars()
    ids = {
        "run": run_id or str(bound.get("run", "")),
        "request": request_id or str(bound.get("request", "")) or uuid.uuid4().hex,
    }
    # HTTP/2 refuses other characters, and a call must not fail for the sake of its log lines.
    return tuple(
        (_KEYS[name], value) for name, value in ids.items() if value and value.isascii() and value.isprintable()
    )


def completed(metadata: Iterable[tuple[str, Any]] | None) -> tuple[tuple[str, Any], ...]:
    """The given metadata, with the missing ids added."""
    given = tuple(metadata or ())
    keys = {key for key, _ in given}
    return given + tuple((key, value) for key, value in call_metadata() if key not in keys)


def ids_from_metadata(metadata: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """The ids by the names under which logs know them."""
    found = dict(metadata)
    return {name: found[key] for name, key in _KEYS.items() if key in found}


def to_status(error: MillraceError) -> grpc.Status:
    """The status of this error; an error class without a row uses that of its base."""
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


def from_call(error: grpc.RpcError, peer: str) -> MillraceError:
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
    return CLASS_OF_BARE_STATUS.get(code, MillraceError)(f"{peer}: {code.name}: {message}")


class translated_errors:
    """Raise the peer's error instead of ``grpc.RpcError``; ``peer`` names the peer in messages.

    ``stream`` names the call whose stream the body reads: its cancellation becomes an ``InfrastructureError``. grpc.aio
    raises ``CancelledError`` in the task that reads, also when the server ended the call with CANCELLED (as one that
    stops does). Taken for the cancellation of the task itself, it would end a loop that should reconnect.
    """

    __slots__ = ("_cancelling", "_peer", "_stream")

    def __init__(self, peer: str, stream: str = "") -> None:
        self._peer = peer
        self._stream = stream
        self._cancelling = 0

    def __enter__(self) -> None:
        if self._stream:
            self._cancelling = _num_cancellations()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_call(error, self._peer) from None
        if self._stream and isinstance(error, asyncio.CancelledError) and _num_cancellations() <= self._cancelling:
            raise InfrastructureError(f"{self._stream}: the call was cancelled") from None


def _num_cancellations() -> int:
    """Number of pending cancellations of the current task."""
    task = asyncio.current_task()
    assert task is not None, "a stream is read in a task"
    return task.cancelling()


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
