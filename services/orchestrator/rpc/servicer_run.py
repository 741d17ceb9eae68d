"""gRPC service for people and tools: progress and run control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import orjson

from services.common import codec
from services.common.config.recipe import Recipe
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.telemetry.logs import without_passwords
from services.common.wire import write
from services.orchestrator.monitoring.progress import Progress
from services.orchestrator.state.run_control import RunControl, RunState
from services.orchestrator.state.scores import DatasetScore

Context = grpc.aio.ServicerContext[Any, Any]

WATCH_EVERY_S = 1.0
_STATES, _ = codec.members(RunState, run_pb2.RunState.DESCRIPTOR)


class RunRequests(Protocol):
    """What people and tools may ask of a run."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class RunServicer(run_pb2_grpc.RunServiceServicer):
    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        recipe: Recipe,
        *,
        progress: Callable[[], Progress],
        requests: RunRequests,
        control: RunControl,
    ) -> None:
        """``progress`` returns the present state at every call."""
        self._run_id, self._run_dir = run_id, run_dir
        # Without passwords: a reader of the run's state need not reach its Redis. The gateway reads the file itself.
        self._config_json = orjson.dumps(without_passwords(recipe.model_dump(mode="json"))).decode()
        self._progress = progress
        self._requests, self._control = requests, control
        self.closing = asyncio.Event()

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        now = self._progress()
        return run_pb2.GetRunResponse(
            run_id=self._run_id,
            state=_STATES[now.state],  # type: ignore[arg-type]
            config_json=self._config_json,
            progress=progress_to_proto(now),
            run_dir=str(self._run_dir.resolve()),
        )

    async def WatchRun(
        self, request: run_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        # A yielded state waits for space in the peer's window, and the loop reads the next state only then: a slow
        # reader misses states, and keeps no more of them in memory than the window holds.
        while True:
            now = self._progress()
            yield run_pb2.WatchRunResponse(progress=progress_to_proto(now))
            if now.state in (RunState.FINISHED, RunState.STOPPED) or self.closing.is_set():
                return
            try:
                await asyncio.wait_for(self.closing.wait(), WATCH_EVERY_S)
            except TimeoutError:
                continue

    async def PauseRun(self, request: run_pb2.PauseRunRequest, context: Context) -> run_pb2.PauseRunResponse:
        self._requests.pause()
        return run_pb2.PauseRunResponse()

    async def ResumeRun(self, request: run_pb2.ResumeRunRequest, context: Context) -> run_pb2.ResumeRunResponse:
        self._requests.resume()
        return run_pb2.ResumeRunResponse()

    async def StopRun(self, request: run_pb2.StopRunRequest, context: Context) -> run_pb2.StopRunResponse:
        self._control.stop(request.reason or "asked to stop")
        return run_pb2.StopRunResponse()


codec.RENAMED |= {Progress: {"set_aside": ""}, DatasetScore: {"pass_at": ""}}  # pairs, which are added below


def progress_to_proto(now: Progress) -> run_pb2.RunProgress:
    proto = write(now, run_pb2.RunProgress())
    for (kind, reason), count in sorted(now.set_aside.items()):
        proto.set_aside.add(kind=kind, reason=reason.value, count=count)
    for result, written in zip(now.evaluations, proto.evaluations, strict=True):
        for score, dataset in zip(result.datasets, written.datasets, strict=True):
            for k, share in score.pass_at:
                write(share, dataset.pass_at.add(k=k).share)
    return proto
