"""A scripted replica and a scripted trainer: light peers of the orchestrator that speak the real gRPC contracts.

No model: a rollout is a fixed number of seeded tokens, a training step is a pause. Used by the throughput benchmark and
by the orchestrator's integration tests; both survive an orchestrator that goes away and comes back.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from services.common.aio import TaskOwner, ended
from services.common.errors import DeadlineError, InfrastructureError, LeaseLostError, RollmillError
from services.common.pb import pool_pb2, pool_pb2_grpc, training_pb2, training_pb2_grpc, trajectory_pb2, weights_pb2
from services.common.rpc.client import channel, translated_errors
from services.inference.records_out import LINGER_S, take_message

REPORT_EVERY_S = 0.5
RETRY_S = 0.1
NUM_PROMPT_TOKENS = 4

Reward = Callable[[pool_pb2.RunTaskGroup, int], float]


def alternating_reward(order: pool_pb2.RunTaskGroup, index: int) -> float:
    """Half of every task group is right, so no group is dropped."""
    return float(index % 2)


def digest_of(policy: str, number: int) -> str:
    return f"xxh3-128:{policy}-{number}"


@dataclass(slots=True)
class Rollouts:
    """The shape of a scripted rollout."""

    num_tokens: int = 32
    latency_s: float = 0.0
    reward: Reward = alternating_reward
    seed: int = 0
    latency_of_source_s: Mapping[str, float] = field(default_factory=dict)  # instead, by source of tasks
    _pieces: tuple[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        ids = rng.integers(0, 50_000, self.num_tokens).astype("<i4")
        logprobs = -rng.exponential(1.0, self.num_tokens).astype("<f4")
        self._pieces = (ids.tobytes(), logprobs.tobytes())

    def seconds(self, order: pool_pb2.RunTaskGroup) -> float:
        """How long the rollouts of a task group take."""
        return self.latency_of_source_s.get(order.source, self.latency_s)

    def trajectory(
        self, order: pool_pb2.RunTaskGroup, index: int, held: dict[str, weights_pb2.WeightVersion], started_at: float
    ) -> trajectory_pb2.Trajectory:
        reward = self.reward(order, index)
        ids, logprobs = self._pieces
        trajectory = trajectory_pb2.Trajectory(task_group_id=order.task_group_id, index=index, reward=reward)
        trajectory.started_at.FromNanoseconds(int(started_at * 1e9))
        trajectory.finished_at.FromNanoseconds(int(time.time() * 1e9))
        for policy, version in held.items():
            if order.policies and policy not in order.policies:
                continue
            sequence = trajectory.sequences.add(
                policy=policy, role="agent", reward=reward, stop_reason=trajectory_pb2.STOP_REASON_STOP
            )
            sequence.segments.add(
                source=trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT,
                token_ids=ids[: 4 * NUM_PROMPT_TOKENS],
                weight_version=-1,
            )
            sequence.segments.add(
                source=trajectory_pb2.TOKEN_SOURCE_POLICY,
                token_ids=ids,
                logprobs=logprobs,
                weight_version=version.number,
            )
        return trajectory


class ScriptedReplica:
    def __init__(
        self,
        address: str,
        *,
        replica_id: str = "a",
        policies: tuple[str, ...] = ("model0",),
        num_slots: int = 64,
        rollouts: Rollouts | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = uuid.uuid4().hex
        self.num_slots = num_slots
        self.rollouts = rollouts or Rollouts()
        self.held = {
            policy: weights_pb2.WeightVersion(policy=policy, number=0, digest=digest_of(policy, 0))
            for policy in policies
        }
        self.orders: list[pool_pb2.RunTaskGroup] = []
        self.outcomes: dict[tuple[str, int], list[int]] = {}  # acknowledgements by slot
        self.announced: list[weights_pb2.WeightVersion] = []
        self.cancelled: list[str] = []
        self.num_tokens = 0
        self.drained = asyncio.Event()
        self.fetch = True  # take announced versions
        self._unacknowledged: dict[tuple[str, int], pool_pb2.NumberedRecord] = {}
        self._known: set[tuple[str, int]] = set()
        self._running: dict[str, int] = {}
        self._emission: list[tuple[float, float]] = []
        self._new = asyncio.Event()
        self._to_send: list[tuple[str, int]] = []
        self._channel = channel(address)
        self._stub = pool_pb2_grpc.PoolServiceStub(self._channel)
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.start(self._again(self._follow, "JoinPool"), "replica.join")
        self._tasks.start(self._again(self._stream, "StreamTrajectories"), "replica.stream")
        self._tasks.start(self._report(), "replica.report")

    async def close(self) -> None:
        await self._tasks.close()
        await self._channel.close()

    async def _again(self, work: Callable[[], Any], stream: str) -> None:
        while not self.drained.is_set():
            try:
                with translated_errors("orchestrator", stream):
                    await work()
            except RollmillError:
                pass  # it is restarting, or has ended the stream: join again
            await asyncio.sleep(RETRY_S)

    def _held(self) -> list[pool_pb2.HeldVersion]:
        return [pool_pb2.HeldVersion(policy=p, number=v.number, digest=v.digest) for p, v in self.held.items()]

    async def _follow(self) -> None:
        request = pool_pb2.JoinPoolRequest(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            held_versions=self._held(),
            num_slots=self.num_slots,
            running_task_group_ids=list(self._running),
        )
        call = self._stub.JoinPool(request)
        async for response in call:
            command = response.WhichOneof("command")
            if command == "run_task_group":
                self._take(response.run_task_group)
            elif command == "new_version":
                self.announced.append(response.new_version.version)
                if self.fetch:
                    self._swap(response.new_version.version)
                    self._tasks.start(self._report_once(), "replica.swapped")
            elif command == "cancel_task_group":
                self._cancel(response.cancel_task_group.task_group_id)
            elif command == "drain":
                self.drained.set()
                call.cancel()

    def _swap(self, version: weights_pb2.WeightVersion) -> None:
        self.held[version.policy] = version

    def _cancel(self, task_group_id: str) -> None:
        self.cancelled.append(task_group_id)

    def _take(self, order: pool_pb2.RunTaskGroup) -> None:
        self.orders.append(order)
        new = [i for i in order.indices if (order.task_group_id, i) not in self._known]
        self._known.update((order.task_group_id, i) for i in new)
        if new:
            self._running[order.task_group_id] = len(new)
            if self.rollouts.seconds(order):
                self._tasks.start(self._play(order, new), "replica.play")
            else:
                self._finish(order, new, time.time())

    async def _play(self, order: pool_pb2.RunTaskGroup, indices: list[int]) -> None:
        started_at = time.time()
        await asyncio.sleep(self.rollouts.seconds(order))
        self._finish(order, indices, started_at)

    def _finish(self, order: pool_pb2.RunTaskGroup, indices: list[int], started_at: float) -> None:
        self._running.pop(order.task_group_id, None)
        for index in indices:
            trajectory = self.rollouts.trajectory(order, index, self.held, started_at)
            self.put(pool_pb2.NumberedRecord(trajectory=trajectory))
        self.num_tokens += self.rollouts.num_tokens * len(indices)
        self._emission.append((started_at, time.time()))

    def put(self, record: pool_pb2.NumberedRecord) -> None:
        """Send a record until its acknowledgement."""
        body = record.trajectory if record.HasField("trajectory") else record.failure
        slot = (body.task_group_id, body.index)
        self._unacknowledged[slot] = record
        self._to_send.append(slot)
        self._new.set()

    async def _stream(self) -> None:
        sent: dict[int, tuple[str, int]] = {}
        self._to_send = list(self._unacknowledged)
        self._new.set()
        call = self._stub.StreamTrajectories()
        # A writer of its own, as a replica has: an iterator that grpc consumes outlives its stream in a task that nothing ends.
        writer = asyncio.create_task(self._write(call, sent), name="replica.writer")
        try:
            while isinstance(response := await call.read(), pool_pb2.StreamTrajectoriesResponse):
                for ack in response.acks:
                    slot = sent.pop(ack.record_number)
                    self._unacknowledged.pop(slot, None)
                    self.outcomes.setdefault(slot, []).append(ack.outcome)
        finally:
            try:
                await ended(writer)
            finally:
                call.cancel()

    async def _write(self, call: Any, sent: dict[int, tuple[str, int]]) -> None:
        number = 0
        while True:
            await self._new.wait()
            self._new.clear()
            slots, self._to_send = self._to_send, []
            waiting: deque[pool_pb2.NumberedRecord] = deque()
            for slot in slots:
                record = self._unacknowledged.get(slot)
                if record is not None:
                    number += 1
                    sent[number] = slot
                    record.record_number = number
                    waiting.append(record)
            while waiting:
                await call.write(
                    pool_pb2.StreamTrajectoriesRequest(
                        replica_id=self.replica_id, incarnation=self.incarnation, records=take_message(waiting)
                    )
                )
            await asyncio.sleep(LINGER_S)  # as a replica does

    async def _report(self) -> None:
        while not self.drained.is_set():
            await asyncio.sleep(REPORT_EVERY_S)
            await self._report_once()

    async def _report_once(self) -> None:
        emission, self._emission = self._emission, []
        request = pool_pb2.StreamReportsRequest(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            held_versions=self._held(),
            running_task_group_ids=list(self._running),
            num_generated_tokens=self.num_tokens,
            emission_intervals=[pool_pb2.Interval(start_s=begin, end_s=end) for begin, end in emission],
        )
        try:
            with translated_errors("orchestrator"):
                await report_once(self._stub, request, timeout_s=5.0)
        except (LeaseLostError, InfrastructureError, DeadlineError):
            pass  # joining again is the other task's business


async def report_once(
    stub: pool_pb2_grpc.PoolServiceAsyncStub, request: pool_pb2.StreamReportsRequest, timeout_s: float
) -> pool_pb2.StreamReportsResponse:
    """The answer to one report, over a stream of its own. Raises ``grpc.RpcError``."""
    stream = stub.StreamReports(timeout=timeout_s, wait_for_ready=True)
    try:
        await stream.write(request)
        answer = await stream.read()
        assert isinstance(answer, pool_pb2.StreamReportsResponse), "the orchestrator has ended the stream of reports"
        return answer
    finally:
        stream.cancel()


@dataclass(frozen=True, slots=True)
class Pulled:
    """A batch, as received by one rank."""

    header: training_pb2.BatchHeader
    sequences: tuple[training_pb2.TrainingSequence, ...]

    @property
    def ids(self) -> list[str]:
        return [sequence.sequence_id for sequence in self.sequences]


class ScriptedTrainer:
    def __init__(self, address: str, *, policy: str = "model0", train_s: float = 0.0) -> None:
        self.policy = policy
        self.train_s = train_s
        self.incarnation = uuid.uuid4().hex
        self.welcome: training_pb2.TrainingWelcome | None = None
        self.commands: list[str] = []
        self.stopped = asyncio.Event()
        self.pulled: dict[int, Pulled] = {}
        self._step = 0  # the last of ``throughput``
        self._channel = channel(address)
        self.stub = training_pb2_grpc.TrainingServiceStub(self._channel)
        self._tasks = TaskOwner()
        self._welcomed = asyncio.Event()

    async def join(self, recovered_version: int = 0) -> training_pb2.TrainingWelcome:
        self._tasks.start(self._stay(recovered_version), "trainer.join")
        self._tasks.start(self._report(), "trainer.report")
        await self._welcomed.wait()
        assert self.welcome is not None
        return self.welcome

    async def close(self) -> None:
        await self._tasks.close()
        await self._channel.close()

    async def run(self, num_steps: int) -> None:
        """Join, publish version 0, train every step."""
        welcome = await self.join()
        if welcome.newest_version < 0:
            await self.publish(0)
        await self.train(range(max(welcome.newest_version, 0) + 1, num_steps + 1))

    async def train(self, steps: Iterable[int]) -> None:
        """Of a trainer that has joined: two joined clients would replace each other without end."""
        for step in steps:
            self.pulled[step] = await self.pull(step)
            began = time.time()
            if self.train_s:
                await asyncio.sleep(self.train_s)
            await self.publish(step, interval=(began, time.time()))

    async def throughput(
        self, seconds: float, warm_up: int = 1, warm: Callable[[], None] = lambda: None
    ) -> tuple[int, float]:
        """Pull and publish step after step for so long; sequences pulled and seconds, both after ``warm_up`` steps, at
        then ``warm`` is called. Another call goes on with the step after."""
        count, begin, warm_at = 0, 0.0, self._step + warm_up
        while not begin or time.perf_counter() - begin < seconds:
            self._step += 1
            pulled = await self.pull(self._step)
            count += len(pulled.sequences)
            await self.publish(self._step)
            if self._step == warm_at:
                warm()
                count, begin = 0, time.perf_counter()
        return count, time.perf_counter() - begin

    async def pull(self, step: int, rank: int = 0, num_ranks: int = 1) -> Pulled:
        """Ask until the batch is there."""
        while True:
            try:
                with translated_errors("orchestrator"):
                    return await self.pull_once(step, rank, num_ranks)
            except (DeadlineError, InfrastructureError):
                await asyncio.sleep(RETRY_S)

    async def pull_once(self, step: int, rank: int = 0, num_ranks: int = 1, timeout_s: float = 60.0) -> Pulled:
        request = training_pb2.PullBatchRequest(policy=self.policy, training_step=step, rank=rank, num_ranks=num_ranks)
        header: training_pb2.BatchHeader | None = None
        sequences = []
        call = self.stub.PullBatch(request, timeout=timeout_s)
        while isinstance(response := await call.read(), training_pb2.PullBatchResponse):
            if response.HasField("header"):
                header = response.header
            elif response.HasField("chunk"):
                sequences += response.chunk.sequences
            else:
                assert response.footer.num_sequences == len(sequences)
        if header is None:
            raise grpc.aio.UsageError("the stream ended without a header")
        return Pulled(header, tuple(sequences))

    async def publish(
        self, number: int, digest: str = "", interval: tuple[float, float] | None = None, checkpoint_step: int = 0
    ) -> int:
        version = weights_pb2.WeightVersion(
            policy=self.policy, number=number, digest=digest or digest_of(self.policy, number), sources=["127.0.0.1:1"]
        )
        request = training_pb2.PublishVersionRequest(
            version=version,
            incarnation=self.incarnation,
            metrics={"loss": 1.0 / (number + 1)},
            compute_intervals=[pool_pb2.Interval(start_s=interval[0], end_s=interval[1])] if interval else [],
            checkpoint_step=checkpoint_step,
        )
        while True:
            try:
                with translated_errors("orchestrator"):
                    response = await self.stub.PublishVersion(request, timeout=10.0)
                    return int(response.newest_version)
            except (DeadlineError, InfrastructureError):
                await asyncio.sleep(RETRY_S)

    async def _stay(self, recovered_version: int) -> None:
        while True:
            request = training_pb2.JoinTrainingRequest(
                policy=self.policy, incarnation=self.incarnation, recovered_version=recovered_version, num_ranks=1
            )
            try:
                with translated_errors("orchestrator", "JoinTraining"):
                    call = self.stub.JoinTraining(request)
                    async for response in call:
                        command = response.WhichOneof("command")
                        if command == "welcome":
                            self.welcome = response.welcome
                            self._welcomed.set()
                        else:
                            self.commands.append(command)
                        if command == "stop":
                            self.stopped.set()
                            call.cancel()
                            return
            except RollmillError:
                pass  # it is restarting: join again
            await asyncio.sleep(RETRY_S)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            request = training_pb2.ReportTrainerRequest(
                policy=self.policy, incarnation=self.incarnation, state="training"
            )
            try:
                with translated_errors("orchestrator"):
                    await self.stub.ReportTrainer(request, timeout=5.0)
            except (LeaseLostError, InfrastructureError, DeadlineError):
                pass  # joining again is the other task's business
