"""gRPC service for people and tools: progress and run control."""

from __future__ import annotations

from typing import Any

import grpc
import orjson

from services.common.pb import run_pb2, run_pb2_grpc
from services.common.telemetry.logs import without_passwords
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.progress import progress

Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(run_pb2_grpc.RunServiceServicer):
    def __init__(self, core: OrchestratorCore) -> None:
        self._core = core
        # Without passwords: a reader of the run's state need not reach its Redis. The gateway reads the file itself.
        self._config_json = orjson.dumps(without_passwords(core.recipe.model_dump(mode="json"))).decode()

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        now = progress(self._core)
        return run_pb2.GetRunResponse(
            run_id=self._core.run_id,
            state=now.state,
            config_json=self._config_json,
            progress=now,
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
