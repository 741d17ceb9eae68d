"""A replica carries out turns in order, and the clocks of its rollouts stand still meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.records import DeviceTurn, Purpose, Task
from services.inference.engine.base import sharing
from services.inference.replica import EngineTurns
from services.inference.rollouts import Attempts, RolloutClock
from tests.waiting import until


@dataclass
class Policy:
    """The weights of one policy, and the clocks of the rollouts."""

    calls: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def weights(self) -> Policy:
        return self

    async def release(self) -> None:
        self.calls.append("release")
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def restore(self) -> None:
        self.calls.append("restore")

    def stand_still(self) -> None:
        self.calls.append("stand still")

    def go_on(self) -> None:
        self.calls.append("go on")


@pytest.fixture
async def policy() -> Policy:
    found = Policy()
    found.gate.set()
    return found


@pytest.fixture
async def turns(policy: Policy) -> AsyncIterator[EngineTurns]:
    made = EngineTurns({"p": policy}, policy)  # type: ignore[dict-item]
    task = asyncio.ensure_future(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_turns_are_carried_out_in_order_and_reported(policy: Policy, turns: EngineTurns) -> None:
    reported: list[int] = []
    turns.on_done = lambda: reported.append(turns.done.number)
    for number, yours in enumerate((False, True, True, False), 1):
        turns.offer(DeviceTurn(number, yours))
        await until(lambda number=number: turns.done.number == number)
    assert reported == [1, 2, 3, 4]
    assert policy.calls == ["stand still", "release", "restore", "go on", "stand still", "release"]


async def test_an_engine_that_frees_nothing_ends_the_process(policy: Policy) -> None:
    """The orchestrator counts on the device; a supervisor starts the replica again."""
    policy.error = InfrastructureError("no answer")
    turns = EngineTurns({"p": policy}, policy)  # type: ignore[dict-item]
    turns.offer(DeviceTurn(1, False))
    with pytest.raises(InfrastructureError, match="no answer"):
        await turns.run()
    assert turns.done.number == 0


async def test_an_engine_without_the_interface_is_refused() -> None:
    class Plain:
        pass

    with pytest.raises(ConfigError, match=r"Plain does not free its memory.*placement: apart"):
        sharing(Plain())  # type: ignore[arg-type]


@dataclass
class Waiting:
    """A workflow that never ends, and the little of an order that ``Attempts`` reads."""

    timeout_s: float = 0.05
    task_group_id: str = "g"
    required_versions: dict[str, int] = field(default_factory=dict)
    policies: tuple[str, ...] = ()
    purpose: Purpose = Purpose.TRAIN
    seed: int = 1
    task: Task = field(default_factory=lambda: Task(task_id="7", data={}))
    sampling: Any = None
    source: str = ""

    async def run(self, task: Any, context: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_a_rollout_does_not_time_out_while_another_holds_the_device(begins: str) -> None:
    order = Waiting()
    attempts = Attempts(
        workflows={Purpose.TRAIN: order},  # type: ignore[dict-item]
        policies={},
        gateway=None,  # type: ignore[arg-type]
        endpoint=None,
        infra_retries=0,
        account=None,  # type: ignore[arg-type]
    )

    def begin() -> asyncio.Task[Any]:
        return asyncio.create_task(attempts.play(order, 0, RolloutClock()))  # type: ignore[arg-type]

    rollout = begin() if begins == "before" else None
    await asyncio.sleep(0)
    attempts.stand_still()
    rollout = rollout or begin()
    done, _ = await asyncio.wait({rollout}, timeout=4 * order.timeout_s)
    assert not done
    attempts.go_on()
    with pytest.raises(DeadlineError, match="not done within"):
        await rollout
