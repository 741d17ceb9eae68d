"""An orchestrator for trainers: the real contracts over real gRPC, with recorded batches and a ledger in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from services.common.config.recipe import Recipe
from services.common.errors import InfrastructureError, InvalidRequestError, LeaseLostError, VersionConflictError
from services.common.pb import run_pb2, run_pb2_grpc, training_pb2, training_pb2_grpc
from services.common.records import RankBatch, WeightVersion
from services.common.rpc.server import Server
from services.common.wire import batch_chunks, duration_to_proto, read, write
from tests.unit.trainer_service.building import POLICY, batch_of
from tests.waiting import WAIT_S


class FakeOrchestrator(run_pb2_grpc.RunServiceServicer, training_pb2_grpc.TrainingServiceServicer):
    """Survives ``stop_serving`` and ``serve`` on the same port, as a restarted orchestrator does with its journal."""

    def __init__(self, recipe: Recipe, run_dir: Path, batches: Callable[[int, int, int], RankBatch] = batch_of) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.ledger: dict[int, str] = {}
        self.sources: dict[int, tuple[str, ...]] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.intervals: dict[int, list[Any]] = {}
        self.pulls: list[int] = []  # steps, in the order in which the first rank asked
        self.joins: list[training_pb2.JoinTrainingRequest] = []
        self.reports: list[training_pb2.ReportTrainerRequest] = []
        self.counters: Counter[str] = Counter()
        self.held_step: int | None = None  # no batch of this step for now
        self.refusal: Exception | None = None  # of JoinTraining
        self.stop_when_done = True
        self._batches = batches
        self._streams: dict[str, asyncio.Queue[training_pb2.JoinTrainingResponse | Exception]] = {}
        self._changed = asyncio.Condition()
        self._server: Server | None = None
        self._closing = asyncio.Event()
        self._port = 0

    # -- the test's side ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def serve(self) -> None:
        self._closing = asyncio.Event()
        self._server = Server(
            service="orchestrator", instance_id="o", host="127.0.0.1", port=self._port, run_id=self.run_id
        )
        self._server.add(run_pb2_grpc.add_RunServiceServicer_to_server, self, "rollmill.v1.RunService")
        self._server.add(training_pb2_grpc.add_TrainingServiceServicer_to_server, self, "rollmill.v1.TrainingService")
        self._port = await self._server.start()
        self._server.set_ready()

    async def stop_serving(self) -> None:
        if self._server is not None:
            self._closing.set()
            for stream in self._streams.values():
                stream.put_nowait(InfrastructureError("the orchestrator is stopping"))
            await self._notify()
            await self._server.stop(grace_s=0.5)
            self._server = None

    @property
    def run_id(self) -> str:
        return str(self.recipe.run.id)

    @property
    def newest(self) -> int:
        return max(self.ledger, default=-1)

    async def tell(self, command: str) -> None:
        response = training_pb2.JoinTrainingResponse(
            **{
                "pause": {"pause": training_pb2.PauseTraining()},
                "resume": {"resume": training_pb2.ResumeTraining()},
                "checkpoint": {"checkpoint": training_pb2.SaveCheckpoint()},
                "stop": {"stop": training_pb2.StopTraining(reason="test")},
            }[command]
        )
        for stream in self._streams.values():
            stream.put_nowait(response)
        await self._notify()

    async def release(self) -> None:
        await self.hold(None)

    async def hold(self, step: int | None) -> None:
        """Release the step that is held, and hold another."""
        self.held_step = step
        await self._notify()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for an action of the trainer; fails with ``what`` after a minute."""
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"{what}; ledger {sorted(self.ledger)}, pulls {self.pulls}") from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- the trainer's side ------------------------------------------------------------------------------------------

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(
            run_id=self.run_id, config_json=self.recipe.model_dump_json(), run_dir=str(self.run_dir)
        )

    async def JoinTraining(
        self, request: training_pb2.JoinTrainingRequest, context: Any
    ) -> AsyncIterator[training_pb2.JoinTrainingResponse]:
        if self.refusal is not None:
            raise self.refusal
        self.joins.append(request)
        for incarnation, other in self._streams.items():
            if incarnation != request.incarnation:
                other.put_nowait(LeaseLostError("another trainer has joined", holder=request.incarnation))
        stream: asyncio.Queue[training_pb2.JoinTrainingResponse | Exception] = asyncio.Queue()
        self._streams = {request.incarnation: stream}
        await self._notify()
        yield training_pb2.JoinTrainingResponse(
            welcome=training_pb2.TrainingWelcome(
                run_id=self.run_id,
                newest_version=self.newest,
                newest_digest=self.ledger.get(self.newest, ""),
                num_steps=self.recipe.run.steps,
                lease=duration_to_proto(30.0),
            )
        )
        if self._is_over():
            stream.put_nowait(training_pb2.JoinTrainingResponse(stop=training_pb2.StopTraining(reason="done")))
        while True:
            command = await stream.get()
            if isinstance(command, Exception):
                raise command
            yield command

    async def ReportTrainer(
        self, request: training_pb2.ReportTrainerRequest, context: Any
    ) -> training_pb2.ReportTrainerResponse:
        self.reports.append(request)
        await self._notify()
        return training_pb2.ReportTrainerResponse(lease=duration_to_proto(30.0))

    async def PullBatch(
        self, request: training_pb2.PullBatchRequest, context: Any
    ) -> AsyncIterator[training_pb2.PullBatchResponse]:
        step = request.training_step
        if not 1 <= step <= self.recipe.run.steps or request.policy != POLICY:
            raise InvalidRequestError(f"no step {step} of {request.policy}")
        if request.rank == 0:
            self.pulls.append(step)
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closing.is_set() or (self.held_step != step and self.newest >= step - 1)
            )
        if self._closing.is_set():
            raise InfrastructureError("the orchestrator is stopping")
        share = self._batches(step, request.rank, request.num_ranks)
        yield training_pb2.PullBatchResponse(
            header=training_pb2.BatchHeader(
                training_step=step,
                minibatches=[write(totals, training_pb2.MinibatchTotals()) for totals in share.minibatches],
                num_sequences=len(share.sequences),
            )
        )
        for response in batch_chunks(share.sequences, 64 * 1024):
            yield response
        yield training_pb2.PullBatchResponse(footer=training_pb2.BatchFooter(num_sequences=len(share.sequences)))

    async def PublishVersion(
        self, request: training_pb2.PublishVersionRequest, context: Any
    ) -> training_pb2.PublishVersionResponse:
        version = read(WeightVersion, request.version)
        known = self.ledger.get(version.number)
        if known is not None and known != version.digest:
            self.counters["conflicts"] += 1
            raise VersionConflictError(f"version {version.number} has digest {known}")
        if known is None and version.number != self.newest + 1:
            raise InvalidRequestError(f"version {version.number} cannot follow version {self.newest}")
        self.counters["offered_again"] += int(known is not None)
        self.ledger[version.number] = version.digest
        self.sources[version.number] = version.sources
        self.metrics[version.number] = dict(request.metrics)
        self.intervals[version.number] = list(request.compute_intervals)
        if self._is_over():
            await self.tell("stop")
        await self._notify()
        return training_pb2.PublishVersionResponse(newest_version=self.newest)

    def _is_over(self) -> bool:
        return self.stop_when_done and self.newest == self.recipe.run.steps
