"""gRPC service for people and tools: progress and run control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import orjson

from services.common import codec
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.telemetry.logs import without_passwords
from services.common.wire import write
from services.orchestrator.core import OrchestratorCore
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.monitoring.progress import Progress
from services.orchestrator.state.run_control import RunState
from services.orchestrator.state.scores import DatasetScore

Context = grpc.aio.ServicerContext[Any, Any]

_STATES, _ = codec.members(RunState, run_pb2.RunState.DESCRIPTOR)


class RunServicer(run_pb2_grpc.RunServiceServicer):
    def __init__(self, core: OrchestratorCore, *, progress: Callable[[], Progress]) -> None:
        """``progress`` returns the present state at every call."""
        self._core, self._progress = core, progress
        # Without passwords: a reader of the run's state need not reach its Redis. The gateway reads the file itself.
        self._config_json = orjson.dumps(without_passwords(core.recipe.model_dump(mode="json"))).decode()

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        now = self._progress()
        return run_pb2.GetRunResponse(
            run_id=self._core.run_id,
            state=_STATES[now.state],  # type: ignore[arg-type]
            config_json=self._config_json,
            progress=progress_to_proto(now),
            run_dir=str(self._core.run_dir.resolve()),
        )

    async def PauseRun(self, request: run_pb2.PauseRunRequest, context: Context) -> run_pb2.PauseRunResponse:
        self._core.pause()
        return run_pb2.PauseRunResponse()

    async def ResumeRun(self, request: run_pb2.ResumeRunRequest, context: Context) -> run_pb2.ResumeRunResponse:
        self._core.resume()
        return run_pb2.ResumeRunResponse()

    async def StopRun(self, request: run_pb2.StopRunRequest, context: Context) -> run_pb2.StopRunResponse:
        self._core.control.stop(request.reason or "asked to stop")
        return run_pb2.StopRunResponse()


codec.RENAMED |= {  # added below: pairs
    Progress: {"set_aside": "", "evaluations": ""},
    DatasetScore: {"pass_at": ""},
}


def progress_to_proto(now: Progress) -> run_pb2.RunProgress:
    proto = write(now, run_pb2.RunProgress())
    for (kind, reason), count in sorted(now.set_aside.items()):
        proto.set_aside.add(kind=kind, reason=reason.value, count=count)
    for result in now.evaluations:
        write_evaluation(result, proto.evaluations.add())
    return proto


def write_evaluation(result: EvaluationResult, proto: run_pb2.EvaluationResult) -> run_pb2.EvaluationResult:
    """Fill an empty message and return it."""
    write(result, proto)
    for score, dataset in zip(result.datasets, proto.datasets, strict=True):
        for k, share in score.pass_at:
            write(share, dataset.pass_at.add(k=k).share)
    return proto
