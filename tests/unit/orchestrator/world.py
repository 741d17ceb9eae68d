"""A core without grpc or processes; a test can drop and recover the core, as after kill -9."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.records import TaskGroupOrder, WeightVersion
from services.orchestrator import lifecycle
from services.orchestrator.buffer.assembly import Batch
from services.orchestrator.groups import Outcome
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import Quarantine
from services.orchestrator.members import Held, Hello, PlayGroup, Replica
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.recovery import recovered
from services.orchestrator.services.pool import PoolServicer
from services.orchestrator.services.training import TrainingServicer
from services.orchestrator.tasks.rows import ListRows, UsableRows
from services.orchestrator.watch import Watch
from tests.unit.orchestrator.builders import sequence, trajectory
from tests.waiting import WAIT_S


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """Keyword arguments that are not named are the batch section of every policy."""

    mark = "abc"  # of the run, in the names of its task groups

    def __init__(
        self,
        run_dir: Path,
        curation: str = "accept_all",
        policies: tuple[str, ...] = ("model0",),
        untrained: tuple[str, ...] = (),  # of these
        run: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        evaluation: dict[str, Any] | None = None,
        held_out: dict[str, dict[str, Any]] | None = None,  # evaluation datasets of three rows
        envgateway: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        algorithm: dict[str, Any] | None = None,  # of every policy
        placement: str = "apart",
        train: list[dict[str, Any]] | None = None,  # sources of a mixture, without their rows
        **batch: Any,
    ) -> None:
        self.run_dir = run_dir
        self.curation = curation
        self.policies, self.untrained = policies, untrained
        self.run, self.rollout, self.evaluation = run or {}, rollout or {}, evaluation or {}
        self.held_out = held_out or {"held_out": {}}
        self.envgateway, self.algorithm = envgateway or {}, algorithm or {}
        self.sampling, self.placement, self.sources = sampling or {}, placement, train
        self.clock = Clock()
        self.steps = 3
        self.batch = {"size": 8, "max_staleness": 1, **batch}
        self.samples_per_task = 1
        self.segment_bytes = 64 * 1024 * 1024  # of the journal, from the next start
        self.vocab_sizes: dict[str, int | None] = {}
        self.open()

    def open(self) -> None:
        tree = {
            "name": "unit",
            "run": {"id": "unit", "steps": self.steps, **self.run},
            "policies": {
                name: {
                    "trained": name not in self.untrained,
                    "model": {"path": "none"},
                    "batch": self.batch,
                    "algorithm": self.algorithm,
                    "trainer": {"port": 0},
                    "weights": {"port": 0},
                }
                for name in self.policies
            },
            "data": {
                "train": [{"path": "unused", **s} for s in self.sources] if self.sources else {"path": "unused"},
                "evaluation": {name: {"path": "unused", **section} for name, section in self.held_out.items()},
                "curation": self.curation,
            },
            "rollout": {"group_size": 4, "timeout_s": 10.0, **self.rollout},
            "orchestrator": {"min_free_bytes": 5_000_000},
            "envgateway": self.envgateway,
            "placement": self.placement,
            **({"inference": {"a": {"engine": "scripted"}}} if self.placement == "shared" else {}),
            "sampling": self.sampling,
            "evaluation": {"samples_per_task": self.samples_per_task, **self.evaluation},
        }
        recipe = validate(tree, source="test")  # before the journal: a refused recipe leaves no open file
        self.journal = Journal(self.run_dir / "journal", segment_bytes=self.segment_bytes)
        self.core = recovered(lambda aside: self._core(recipe, aside), self.journal.reader)
        self.replica_api, self.trainer_api = PoolServicer(self.core), TrainingServicer(self.core)
        self.journal.start()

    def _core(self, recipe: Recipe, aside: Quarantine) -> OrchestratorCore:
        return OrchestratorCore(
            recipe,
            self.run_dir,
            self.journal,
            training_sources={
                source: UsableRows(ListRows([{"n": i} for i in range(10)], "train"), None)
                for source in recipe.data.sources or [""]
            },
            evaluation_sources={
                name: UsableRows(ListRows([{"n": i} for i in range(3)], name), None) for name in self.held_out
            },
            run_mark=self.mark,
            started_at=0.0,
            aside=aside,
            clock=self.clock,
            vocab_sizes=self.vocab_sizes,
        )

    async def crash(self) -> None:
        """Drop all memory; the journal's thread ends after its queue."""
        await self.journal.close()
        self.core.metrics.close()
        self.open()

    async def close(self) -> None:
        await self.journal.close()
        self.core.metrics.close()

    # --- peers ---

    def join(
        self,
        name: str = "a",
        number: int = 0,
        slots: int = 64,
        incarnation: str = "1",
        running: Any = (),
        weights_address: str = "",
        digests: Mapping[str, str] = MappingProxyType({}),  # by policy, unless equal to the number's
    ) -> Replica:
        numbers = {policy: 0 if policy in self.untrained else number for policy in self.policies}
        held = {policy: Held(n, digests.get(policy, f"d{n}")) for policy, n in numbers.items()}
        return self.replica_api.join(
            Hello(
                replica_id=name,
                incarnation=incarnation,
                num_slots=slots,
                held=held,
                running=tuple(running),
                weights_address=weights_address,
            )
        )

    async def orders(self, replica: Replica) -> list[TaskGroupOrder]:
        """Orders that have been sent and not been looked at."""
        return [c.order for c in await self.commands(replica) if isinstance(c, PlayGroup)]

    async def commands(self, replica: Replica) -> list[Any]:
        await self.settle()
        found = []
        while replica.mailbox is not None and len(replica.mailbox):
            found.append(await replica.mailbox.get())
        return found

    async def settle(self) -> None:
        """Wait until all queued records are durable and applied."""
        for _ in range(3):
            await asyncio.sleep(0)
            await self.journal.append("marks", "", {})
            await asyncio.sleep(0)

    async def send(self, *outcomes: Outcome) -> list[RecordOutcome]:
        answers: list[RecordOutcome] = []
        for outcome in outcomes:
            self.core.ingest.submit(outcome, lambda answer: answers.append(answer.outcome))
        await self.settle()
        return answers

    async def play(self, order: TaskGroupOrder, version: int = 0) -> None:
        """Outcomes of every slot of an order, with a sequence for each policy of the order."""
        for i in order.indices:
            reward = float(i % 2)
            played = [sequence(reward, version, policy=policy) for policy in order.policies or self.policies]
            await self.send(trajectory(order.task_group_id, i, *played, reward=reward))

    async def publish(self, number: int, digest: str = "", incarnation: str = "t", policy: str = "model0") -> int:
        version = WeightVersion(policy=policy, number=number, digest=digest or f"d{number}", sources=("x:1",))
        newest = await self.trainer_api.publish(version, incarnation, metrics={}, compute=[], checkpoint_step=0)
        await asyncio.sleep(0)  # the row of the step is written in the next turn of the loop
        return newest

    def report(self, replica: Replica, number: int) -> None:
        """The replica holds this version of every trained policy."""
        held = {p: Held(number, f"d{number}") for p in self.policies if p not in self.untrained}
        self.replica_api.report(replica.replica_id, replica.incarnation, held=held, num_tokens=0, emission=[])

    def train(self) -> None:
        self.core.begin_training()

    async def begin(self, name: str = "a", **joined: Any) -> tuple[Replica, list[TaskGroupOrder]]:
        """Version 0 is published, training goes on, and a replica has its first orders."""
        replica = self.join(name, **joined)
        for policy in self.policies:
            if policy not in self.untrained:
                await self.publish(0, policy=policy)
        self.train()
        return replica, await self.orders(replica)

    async def pull(self, step: int = 1, policy: str = "model0") -> Batch:
        return await self.trainer_api.pull_batch(policy, step, WAIT_S)

    async def step(self, number: int) -> Batch:
        """One training step: play the orders on the newest version, take the batch, publish."""
        for order in await self.orders(self.join(number=number - 1)):
            await self.play(order, version=number - 1)
        batch = await self.pull(number)
        await self.publish(number)
        return batch

    def lose_trainer(self, policy: str) -> None:
        """End the lease of the policy's trainer, as the periodic checks do when the lease runs out."""
        trainer = self.core.trainers.get(policy) or self.trainer_api.join(policy, "t", 1, 0)
        trainer.lease_until = self.clock.now - 1.0
        self.core.check_leases()

    def watch(self) -> Watch:
        """Periodic checks that have not run yet."""
        return Watch(self.core)


@contextlib.asynccontextmanager
async def living(world: World) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(lifecycle.live(world.core))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def worlds_in(directory: Path) -> AsyncIterator[Callable[..., World]]:
    """Makes worlds in folders of their own, and closes them."""
    made: list[World] = []

    def make(**batch: Any) -> World:
        made.append(World(directory / str(len(made)), **batch))
        return made[-1]

    yield make
    for world in made:
        await world.close()
