"""The command line's view of the orchestrator: synchronous, one call each, explicit deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.errors import InfrastructureError, MillraceError, NotFoundError
from services.common.pb import run_pb2, run_pb2_grpc, status_pb2, status_pb2_grpc

CALL_DEADLINE_S = 5.0


class OrchestratorClient:
    """Raises ``InfrastructureError`` naming the address when nobody answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address)
        self._run = run_pb2_grpc.RunServiceStub(self._channel)
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def get_run(self) -> run_pb2.GetRunResponse:
        with self._translated():
            return self._run.GetRun(run_pb2.GetRunRequest(), timeout=CALL_DEADLINE_S)

    def watch(self) -> Iterator[run_pb2.RunProgress]:
        """Progress about once a second until the run ends."""
        with self._translated():
            for response in self._run.WatchRun(run_pb2.WatchRunRequest()):
                yield response.progress

    def get_status(self) -> status_pb2.GetStatusResponse:
        with self._translated():
            return self._status.GetStatus(status_pb2.GetStatusRequest(), timeout=CALL_DEADLINE_S)

    def pause(self) -> None:
        with self._translated():
            self._run.PauseRun(run_pb2.PauseRunRequest(), timeout=CALL_DEADLINE_S)

    def resume(self) -> None:
        with self._translated():
            self._run.ResumeRun(run_pb2.ResumeRunRequest(), timeout=CALL_DEADLINE_S)

    def stop(self, reason: str) -> None:
        with self._translated():
            self._run.StopRun(run_pb2.StopRunRequest(reason=reason), timeout=CALL_DEADLINE_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise _translate(error, self.address) from None


def _translate(error: grpc.RpcError, address: str) -> MillraceError:
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    detail = (error.details() if isinstance(error, grpc.Call) else "") or str(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return InfrastructureError(f"nobody answers at {address}: is the run still going? (`millrace status --help`)")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return InfrastructureError(f"{address} did not answer within {CALL_DEADLINE_S:g} s")
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(detail)
    return InfrastructureError(f"{address}: {detail}")
