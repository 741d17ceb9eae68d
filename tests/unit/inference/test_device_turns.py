"""A replica carries out turns in order, and the clocks of its rollouts stand still meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.common.errors import ConfigError, InfrastructureError
from services.common.records import DeviceTurn, Purpose
from services.inference.engine.base import sharing
from services.inference.replica import EngineTurns
from services.inference.rollouts import RolloutPlayer
from tests.unit.inference.fakes import FakeGateway, Records, make_order
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


class Waiting:
    """A workflow that never ends."""

    async def run(self, task: Any, context: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_a_rollout_does_not_time_out_while_another_holds_the_device(begins: str) -> None:
    records = Records()
    player = RolloutPlayer(
        workflows={Purpose.TRAIN: Waiting()},  # type: ignore[dict-item]
        policies={},
        gateway=FakeGateway(),
        sink=records,
        replica_id="a",
        num_slots=1,
        infra_retries=0,
    )
    order = make_order(indices=(0,), timeout_s=0.05)
    if begins == "before":
        player.play(order)
    await asyncio.sleep(0)
    player.stand_still()
    if begins == "meanwhile":
        player.play(order)
    await asyncio.sleep(4 * order.timeout_s)
    assert player.num_running == 1
    player.go_on()
    await player.wait_until_idle()
    assert "not done within" in records.failures[0].detail
