"""gRPC service for people and tools: progress and run control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import orjson

from services.common.config.recipe import Recipe
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.records.types import by_name
from services.common.telemetry.logs import without_passwords
from services.common.wire import records as serde
from services.common.wire.accounts import account_to_proto
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.monitoring.progress import Progress
from services.orchestrator.state.run_control import RunControl, RunState
from services.orchestrator.state.scores import Estimate

Context = grpc.aio.ServicerContext[Any, Any]

WATCH_EVERY_S = 1.0
_AS_RECORDED = set(EvaluationResult.__slots__) - {"datasets", "difference", "elapsed_s"}

_STATE = {
    RunState.STARTING: run_pb2.RUN_STATE_STARTING,
    RunState.EVALUATING_START: run_pb2.RUN_STATE_EVALUATING_START,
    RunState.TRAINING: run_pb2.RUN_STATE_TRAINING,
    RunState.PAUSED: run_pb2.RUN_STATE_PAUSED,
    RunState.EVALUATING_END: run_pb2.RUN_STATE_EVALUATING_END,
    RunState.FINISHED: run_pb2.RUN_STATE_FINISHED,
    RunState.STOPPED: run_pb2.RUN_STATE_STOPPED,
}


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
            state=_STATE[now.state],
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


def progress_to_proto(now: Progress) -> run_pb2.RunProgress:
    return run_pb2.RunProgress(
        at=serde.timestamp_to_proto(now.at),
        state=_STATE[now.state],
        policies=[
            run_pb2.PolicyProgress(**{**by_name(p), "reward_mean": p.reward_mean or 0.0, "metrics": dict(p.metrics)})
            for p in now.policies
        ],
        replicas=[run_pb2.ReplicaProgress(**{**by_name(r), "versions": dict(r.versions)}) for r in now.replicas],
        tokens_per_s=now.tokens_per_s,
        evaluations=[evaluation_to_proto(result) for result in now.evaluations],
        counters=dict(now.counters),
        waits=now.waits,
        started_at=serde.timestamp_to_proto(now.started_at),
        stalls=[
            run_pb2.Stall(**{**by_name(stall), "since": serde.timestamp_to_proto(stall.since)}) for stall in now.stalls
        ],
        accounts=[account_to_proto(account) for account in now.accounts],
        disk=None if now.disk is None else run_pb2.DiskOutlook(**by_name(now.disk)),
        set_aside=[
            run_pb2.SetAsideRecords(kind=kind, reason=reason.value, count=count)
            for (kind, reason), count in sorted(now.set_aside.items())
        ],
        threshold=None if now.threshold is None else run_pb2.Threshold(**by_name(now.threshold)),
    )


def evaluation_to_proto(result: EvaluationResult) -> run_pb2.EvaluationResult:
    return run_pb2.EvaluationResult(
        **{name: getattr(result, name) for name in _AS_RECORDED},
        datasets=[
            run_pb2.DatasetScore(
                name=found.name,
                num_items=found.num_items,
                samples_per_item=found.samples_per_item,
                mean_reward=_known_to_proto(found.mean_reward),
                pass_at=[run_pb2.PassAt(k=k, share=_estimate_to_proto(share)) for k, share in found.pass_at],
                failed=found.failed,
                difference=_known_to_proto(found.difference),
            )
            for found in result.datasets
        ],
        difference=_known_to_proto(result.difference),
    )


def _known_to_proto(found: Estimate | None) -> run_pb2.Estimate | None:
    return None if found is None else _estimate_to_proto(found)


def _estimate_to_proto(found: Estimate) -> run_pb2.Estimate:
    return run_pb2.Estimate(**by_name(found))
