"""Many replicas in one process: each speaks the whole contract of a replica over real gRPC, and plays no model.

    JoinPool  --task group-->  its slots  --FIFO, at a given rate over all replicas-->  StreamTrajectories  -->
    acknowledged
    NewVersion --> held at once, reported     as often as asked for: StreamReports with accounts, peers and gauges as a replica's

Each replica has a connection of its own. The oldest task group of a replica ends whenever its turn comes, all slots at
once. The time from there until the next order is in is the dispatch time. Shared by the scripts of this folder; it
reports one ``PoolFigures`` per process as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

import grpc
import numpy as np

from benchmarks._peers import Rollouts, digest_of
from services.common.aio import TaskOwner
from services.common.pb import account_pb2, pool_pb2, pool_pb2_grpc, weights_pb2
from services.common.rpc.client.channel import KEEPALIVE, MEMBER_WINDOW
from services.common.telemetry.activities import ActivityName
from services.common.wire import duration_from_proto

POLICY = "model0"
REPORT_S = 2.0
TICK_S = 0.01
JOINS_AT_ONCE = 50


@dataclass(slots=True)
class PoolFigures:
    """The observations of one process during the measurement."""

    num_acknowledged: int = 0  # trajectories
    num_refused: int = 0
    num_overfilled: int = 0  # orders that came to a replica without free slots for them
    num_running_groups: int = 0  # at the end
    dispatch_s: list[float] = field(default_factory=list)
    late_s: float = 0.0  # how far the process fell behind its own rate, at most: it was starved
    cpu_s: float = 0.0


class SimulatedReplica:
    """One of the pool; ``finish`` ends its oldest task group."""

    def __init__(
        self,
        name: str,
        num_slots: int,
        stub: pool_pb2_grpc.PoolServiceAsyncStub,
        rollouts: Rollouts,
        figures: PoolFigures,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.orders: dict[str, pool_pb2.RunTaskGroup] = {}
        self._known: set[str] = set()  # task groups that it was ever given
        self.num_tokens = 0
        self.held = weights_pb2.WeightVersion(policy=POLICY, number=0, digest=digest_of(POLICY, 0))
        self.welcomed = asyncio.Event()
        self._num_slots = num_slots
        self._stub = stub
        self._rollouts = rollouts
        self._figures = figures
        self._freed: deque[float] = deque()  # when a task group ended whose slots got no other yet
        self._records: asyncio.Queue[pool_pb2.StreamTrajectoriesRequest] = asyncio.Queue()
        self._number = 0
        self._swapped = asyncio.Event()
        self._began = time.monotonic()

    @property
    def num_running(self) -> int:
        return sum(len(order.indices) for order in self.orders.values())

    async def follow(self) -> None:
        """The JoinPool stream, until its end."""
        request = pool_pb2.JoinPoolRequest(
            replica_id=self.name,
            incarnation=self.incarnation,
            held_versions=self._held(),
            num_slots=self._num_slots,
            weights_address=f"{self.name}:1",
        )
        async for response in self._stub.JoinPool(request):
            match response.WhichOneof("command"):
                case "welcome":
                    self.welcomed.set()
                case "run_task_group":
                    self._take(response.run_task_group)
                case "new_version":
                    self.held = response.new_version.version
                    self._swapped.set()
                case "cancel_task_group":
                    self.orders.pop(response.cancel_task_group.task_group_id, None)
                case "drain":
                    return

    def _take(self, order: pool_pb2.RunTaskGroup) -> None:
        if order.task_group_id in self._known:
            return  # sent again because reports were late: it is not played twice
        self._known.add(order.task_group_id)
        if self._freed:
            self._figures.dispatch_s.append(time.perf_counter() - self._freed.popleft())
        self.orders[order.task_group_id] = order
        self._figures.num_overfilled += self.num_running > self._num_slots

    def finish(self) -> int:
        """Send the records of its oldest task group; returns how many."""
        if not self.orders:
            return 0
        order = self.orders.pop(next(iter(self.orders)))
        now = time.time()
        for index in order.indices:
            trajectory = self._rollouts.trajectory(order, index, {POLICY: self.held}, now)
            self._number += 1
            self._records.put_nowait(
                pool_pb2.StreamTrajectoriesRequest(
                    record_number=self._number,
                    replica_id=self.name,
                    incarnation=self.incarnation,
                    trajectory=trajectory,
                )
            )
        self.num_tokens += self._rollouts.num_tokens * len(order.indices)
        self._freed.append(time.perf_counter())
        return len(order.indices)

    async def stream(self) -> None:
        """The record stream, until its end."""
        async for response in self._stub.StreamTrajectories(self._outgoing()):
            for ack in response.acks:
                taken = ack.outcome == pool_pb2.RECORD_OUTCOME_ACCEPTED
                self._figures.num_acknowledged += taken
                self._figures.num_refused += not taken

    async def _outgoing(self) -> AsyncIterator[pool_pb2.StreamTrajectoriesRequest]:
        while True:
            yield await self._records.get()

    async def report(self, first_after_s: float) -> None:
        """At the given interval, and at once when another version is held."""
        await self.welcomed.wait()
        wait_s = first_after_s
        stream = self._stub.StreamReports()
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._swapped.wait()
            except TimeoutError:
                pass
            self._swapped.clear()
            async with asyncio.timeout(30.0):
                await stream.write(self._report())
                response = await stream.read()
            if not isinstance(response, pool_pb2.StreamReportsResponse):
                raise SystemExit(f"the stream of reports has ended: {await stream.details()}")
            wait_s = duration_from_proto(response.next_report) or REPORT_S

    def _held(self) -> list[pool_pb2.HeldVersion]:
        held = self.held
        return [pool_pb2.HeldVersion(policy=held.policy, number=held.number, digest=held.digest)]

    def _report(self) -> pool_pb2.StreamReportsRequest:
        age, busy = time.monotonic() - self._began, self.num_running
        component = f"replica/{self.name}"
        return pool_pb2.StreamReportsRequest(
            replica_id=self.name,
            incarnation=self.incarnation,
            held_versions=self._held(),
            running_task_group_ids=list(self.orders),
            num_generated_tokens=self.num_tokens,
            gauges={f"weights_{name}": 1.0 for name in ("bytes", "pause_s", "swaps", "fetches")} | {"requests": busy},
            accounts=[
                _account(
                    component,
                    age,
                    {ActivityName.GENERATING: f"engine/{POLICY}", ActivityName.WAITING_FOR_TASK_GROUPS: "orchestrator"},
                    busy,
                ),
                _account(f"{component}/weights/{POLICY}", age, {ActivityName.UP_TO_DATE: ""}, 1),
                _account(f"{component}/records", age, {ActivityName.NOTHING_TO_SEND: ""}, 1),
            ],
            peers=[account_pb2.PeerState(component=f"publisher/{POLICY}", address="127.0.0.1:1")],
        )


def _account(component: str, age: float, activities: dict[str, str], num_lanes: int) -> account_pb2.TimeAccount:
    return account_pb2.TimeAccount(
        component=component,
        num_lanes=num_lanes,
        activities=[
            account_pb2.ActivityTime(activity=name, on=on, seconds=age, num_now=num_lanes, longest_now_s=1.0)
            for name, on in activities.items()
        ],
        progress=int(age * 100),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The work of one process: join, be filled, then end ``rate`` trajectories per second for the measured time."""

    address: str
    prefix: str
    num_replicas: int
    num_slots: int
    num_tokens: int
    rate: float
    warm_up_s: float
    measured_s: float
    fill_s: float = 240.0  # at most


async def play(plan: PoolPlan) -> None:
    """Say ``filled``, wait for a line, end task groups, say ``warm`` and at the end the figures, on standard output."""
    figures = PoolFigures()
    rollouts = Rollouts(num_tokens=plan.num_tokens)
    replicas = [
        SimulatedReplica(f"{plan.prefix}{number:04d}", plan.num_slots, _stub(plan.address), rollouts, figures)
        for number in range(plan.num_replicas)
    ]
    async with TaskOwner() as tasks:
        broken = tasks.start(tasks.failed(), "failures")
        for begin in range(0, len(replicas), JOINS_AT_ONCE):
            some = replicas[begin : begin + JOINS_AT_ONCE]
            for offset, replica in enumerate(some, start=begin):
                tasks.start(replica.follow(), "join")
                tasks.start(replica.stream(), "records")
                tasks.start(replica.report(REPORT_S * (1 + offset / len(replicas))), "report")
            await asyncio.gather(*(replica.welcomed.wait() for replica in some))
        async with asyncio.timeout(plan.fill_s):
            while any(replica.num_running < plan.num_slots for replica in replicas):
                if broken.done():
                    broken.result()
                await asyncio.sleep(0.05)
        print("filled", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await _end_groups(replicas, plan.rate, plan.warm_up_s, figures)
        _forget(figures)
        print("warm", flush=True)
        before = time.process_time()
        await _end_groups(replicas, plan.rate, plan.measured_s, figures)
        figures.cpu_s = time.process_time() - before
        figures.num_running_groups = sum(len(replica.orders) for replica in replicas)
        print(json.dumps(asdict(figures)), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        if broken.done():
            broken.result()


def _stub(address: str) -> pool_pb2_grpc.PoolServiceAsyncStub:
    """Of a connection of its own: channels to one address share theirs unless they are told not to."""
    options = [*KEEPALIVE, *MEMBER_WINDOW, ("grpc.use_local_subchannel_pool", 1)]
    stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(
        grpc.aio.insecure_channel(address, options=options)
    )
    return stub


def _forget(figures: PoolFigures) -> None:
    figures.num_acknowledged = figures.num_refused = figures.num_overfilled = 0
    figures.dispatch_s.clear()
    figures.late_s = 0.0


async def _end_groups(replicas: list[SimulatedReplica], rate: float, seconds: float, figures: PoolFigures) -> None:
    """End so many trajectories per second, replica after replica in a shuffled order."""
    turns = np.random.default_rng(7).permutation(len(replicas))
    begin, ended, turn, skipped = time.perf_counter(), 0, 0, 0
    while (passed := time.perf_counter() - begin) < seconds:
        figures.late_s = max(figures.late_s, passed - ended / rate)
        while ended < rate * passed and skipped < len(replicas):
            count = replicas[turns[turn % len(replicas)]].finish()
            ended, turn = ended + count, turn + 1
            skipped = 0 if count else skipped + 1
        skipped = 0
        await asyncio.sleep(TICK_S)


def main() -> None:
    """The process: its plan is the first argument, as JSON."""
    asyncio.run(play(PoolPlan(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
