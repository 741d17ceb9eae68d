"""Errors as gRPC statuses and back, from one table.

On the wire: ``google.rpc.Status`` with one ``ErrorInfo{reason, domain "rollmill", metadata}``, plus ``RetryInfo`` where
waiting helps. The error travels in the trailing metadata, where HTTP/2 peers refuse more than 8 KiB, so long texts are cut:
the caller must get the right error with half of a message, not another error with none.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors
from services.common.errors import DeadlineError, InfrastructureError, RollmillError

DOMAIN = "rollmill"
MESSAGE_BYTES = 1200  # sent twice, once as percent-encoded text
METADATA_VALUE_BYTES = 200
Code = grpc.StatusCode

# Most specific last: every leaf of the tree in services.common.errors has one row.
STATUS_OF: dict[type[RollmillError], grpc.StatusCode] = {
    errors.RollmillError: Code.INTERNAL,
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
CLASS_OF_REASON: dict[str, type[RollmillError]] = {cls.reason: cls for cls in STATUS_OF}
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
