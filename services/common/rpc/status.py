"""gRPC statuses from our errors and back, from one table.

On the wire: ``google.rpc.Status`` with one ``ErrorInfo{reason, domain "millrace", metadata}``, plus ``RetryInfo``
where waiting helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.errors import DeadlineError, InfrastructureError, MillraceError

DOMAIN = "millrace"
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
    errors.DeadlineError: Code.DEADLINE_EXCEEDED,
    errors.InfrastructureError: Code.UNAVAILABLE,
}
CLASS_OF_REASON: dict[str, type[MillraceError]] = {cls.reason: cls for cls in STATUS_OF}
# A status without our details: what the transport itself says.
CLASS_OF_BARE_STATUS: dict[grpc.StatusCode, type[MillraceError]] = {
    Code.UNAVAILABLE: InfrastructureError,
    Code.CANCELLED: InfrastructureError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
}


def to_status(error: MillraceError) -> grpc.Status:
    """The status that tells this error; an error class without a row of its own is told as its base."""
    code = next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    packed = [_pack(detail) for detail in details]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=code.value[0], message=error.message, details=packed)
    return rpc_status.to_status(status)


def from_call(error: grpc.RpcError, peer: str) -> MillraceError:
    """The error that a failed call tells, as the class that the other side raised."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else Code.UNKNOWN
    message = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or str(error)
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
            return CLASS_OF_REASON[info.reason](status.message, retry_after_s=retry_after_s, **dict(info.metadata))
    cls = CLASS_OF_BARE_STATUS.get(code, MillraceError)
    return cls(f"{peer}: {code.name}: {message}")


@contextmanager
def translated_errors(peer: str) -> Iterator[None]:
    """Raise what the peer raised instead of ``grpc.RpcError``; ``peer`` names it for people."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_call(error, peer) from None


def _details(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except ValueError:  # the details contradict the status: not ours
        return None


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
