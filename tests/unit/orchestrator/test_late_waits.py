"""What else may hold a batch back while it waits for due groups, and policies with different settings of ``batch.late``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

import pytest

from services.common.config.policy import BatchConfig
from services.orchestrator.experience import Experience
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import order
from tests.unit.orchestrator.test_late import straggling
from tests.unit.orchestrator.world import World

LateName = Literal["keep", "mask", "wait", "drop"]


async def test_a_pause_within_a_wait_for_due_groups_does_not_poll(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(run={"steps": 9}, late="wait", late_wait_share=0.5, max_staleness=1)
    await straggling(world)
    batches = world.ring.batches["model0"]
    batches.late.step_s = 10.0
    pull = asyncio.ensure_future(world.trainer_side.pull_batch("model0", 2, 30.0))
    await world.settle()
    assert batches.late.left_s() == 5.0
    world.ring.pause()
    await world.settle()
    world.clock.now += 5.0  # the wait is over, and the pause is not
    asked: list[int] = []
    can_serve = batches._can_serve

    def counted(number: int) -> bool:
        asked.append(number)
        return can_serve(number)

    monkeypatch.setattr(batches, "_can_serve", counted)
    batches.notify()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(asked) <= 1, "nothing changed since"
    assert not pull.done()
    world.ring.resume()
    batch = await asyncio.wait_for(pull, 5.0)
    assert batch.record.training_step == 2


@pytest.mark.parametrize(("other", "due"), [("drop", True), ("mask", False), ("keep", False), ("wait", False)])
def test_a_group_is_cancelled_only_where_every_policy_would_drop_it(other: LateName, due: bool) -> None:
    experience = Experience(
        {"a": BatchConfig(late="drop", max_staleness=1), "b": BatchConfig(late=other, max_staleness=1)},
        num_steps=9,
        counters=Counter(),
    )
    group = TaskGroup(order=order("g"), born={"a": 0, "b": 0})
    experience.issued(group)
    for policy in ("a", "b"):
        experience.advanced(policy, 3)
    assert [found.id for found in experience.due("a")] == ["g"]
    assert experience.is_due_everywhere(group) is due
