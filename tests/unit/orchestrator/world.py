"""A ring without grpc or processes, that can be thrown away and recovered, as after kill -9."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.types import TaskGroupOrder, WeightVersion
from services.orchestrator import lifecycle
from services.orchestrator.commands import PlayGroup
from services.orchestrator.datasets import UsableRows
from services.orchestrator.groups import Outcome
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.writer import Journal
from services.orchestrator.pool import Held, Hello, Replica
from services.orchestrator.raw_rows import ListRows
from services.orchestrator.recovery import recovered
from services.orchestrator.replica_side import ReplicaSide
from services.orchestrator.ring import Ring
from services.orchestrator.trainer_side import TrainerSide
from tests.unit.orchestrator.builders import sequence, trajectory


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
        **batch: Any,
    ) -> None:
        self.run_dir = run_dir
        self.curation = curation
        self.policies, self.untrained = policies, untrained
        self.run, self.rollout, self.evaluation = run or {}, rollout or {}, evaluation or {}
        self.held_out = held_out or {"held_out": {}}
        self.envgateway, self.algorithm = envgateway or {}, algorithm or {}
        self.sampling = sampling or {}
        self.clock = Clock()
        self.steps = 3
        self.batch = {"size": 8, "max_staleness": 1, **batch}
        self.samples_per_task = 1
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
                "train": {"path": "unused"},
                "evaluation": {name: {"path": "unused", **section} for name, section in self.held_out.items()},
                "curation": self.curation,
            },
            "rollout": {"group_size": 4, "timeout_s": 10.0, **self.rollout},
            "orchestrator": {"min_free_bytes": 5_000_000},
            "envgateway": self.envgateway,
            "sampling": self.sampling,
            "evaluation": {"samples_per_task": self.samples_per_task, **self.evaluation},
        }
        recipe = validate(tree, source="test")  # before the journal: a refused recipe leaves nothing open
        self.journal = Journal(self.run_dir / "journal")
        reader = JournalReader(self.run_dir / "journal")
        self.ring = recovered(lambda: self._ring(recipe), reader)
        reader.close()
        self.replica_side, self.trainer_side = ReplicaSide(self.ring), TrainerSide(self.ring)
        self.journal.start()

    def _ring(self, recipe: Recipe) -> Ring:
        return Ring(
            recipe,
            self.run_dir,
            self.journal,
            training_source=UsableRows(ListRows([{"n": i} for i in range(10)], "train"), None),
            evaluation_sources={
                name: UsableRows(ListRows([{"n": i} for i in range(3)], name), None) for name in self.held_out
            },
            run_mark=self.mark,
            started_at=0.0,
            clock=self.clock,
            vocab_sizes=self.vocab_sizes,
        )

    async def crash(self) -> None:
        """Everything in memory is gone; the journal's thread ends after what it has."""
        await self.journal.close()
        self.ring.metrics.close()
        self.open()

    async def close(self) -> None:
        await self.journal.close()
        self.ring.metrics.close()

    # --- peers ---

    def join(
        self,
        name: str = "a",
        number: int = 0,
        slots: int = 64,
        incarnation: str = "1",
        running: Any = (),
        weights_address: str = "",
        digests: Mapping[str, str] = MappingProxyType({}),  # by policy, where it is not that of the number
    ) -> Replica:
        numbers = {policy: 0 if policy in self.untrained else number for policy in self.policies}
        held = {policy: Held(n, digests.get(policy, f"d{n}")) for policy, n in numbers.items()}
        return self.replica_side.join(
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
        """Let everything that is queued become durable and be acted on."""
        for _ in range(3):
            await asyncio.sleep(0)
            await self.journal.append("marks", "", dict)
            await asyncio.sleep(0)

    async def send(self, *outcomes: Outcome) -> list[RecordOutcome]:
        answers: list[RecordOutcome] = []
        for outcome in outcomes:
            self.ring.ingest.submit(outcome, lambda answer: answers.append(answer.outcome))
        await self.settle()
        return answers

    async def play(self, order: TaskGroupOrder, version: int = 0) -> None:
        """Every slot of an order, with a sequence for each policy that plays it."""
        for i in order.indices:
            reward = float(i % 2)
            played = [sequence(reward, version, policy=policy) for policy in order.policies or self.policies]
            await self.send(trajectory(order.task_group_id, i, *played, reward=reward))

    async def publish(self, number: int, digest: str = "", incarnation: str = "t", policy: str = "model0") -> int:
        version = WeightVersion(policy=policy, number=number, digest=digest or f"d{number}", sources=("x:1",))
        return await self.trainer_side.publish(version, incarnation, metrics={}, compute=[], checkpoint_step=0)

    def train(self) -> None:
        self.ring.dispatcher.train = True
        self.ring.dispatcher.schedule()


@contextlib.asynccontextmanager
async def living(world: World) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(lifecycle.live(world.ring))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
