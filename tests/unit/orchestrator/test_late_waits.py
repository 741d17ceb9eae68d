"""Other reasons for a batch to wait for due groups, and policies with different settings of ``batch.late``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from services.common.config.training import BatchConfig
from services.orchestrator.buffer.assembly import Batch
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import order
from tests.unit.orchestrator.test_late import straggling
from tests.unit.orchestrator.world import World

LateName = Literal["keep", "mask", "wait", "drop"]


async def waiting(worlds: Callable[..., World], **settings: Any) -> tuple[World, asyncio.Task[Batch]]:
    """A batch that is there and waits for due groups, for 5 s at most."""
    world = worlds(late="wait", max_staleness=1, **settings)
    await straggling(world)
    batches = world.core.batches["model0"]
    batches.late.step_s = 20.0
    pull = asyncio.ensure_future(world.trainer_api.pull_batch("model0", 2, 30.0))
    await world.settle()
    assert batches.late.left_s() == 5.0
    return world, pull


@pytest.mark.parametrize(("other", "due"), [("drop", True), ("mask", False), ("keep", False), ("wait", False)])
def test_a_group_is_cancelled_only_where_every_policy_would_drop_it(other: LateName, due: bool) -> None:
    experience = ExperiencePipeline(
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


@pytest.mark.parametrize("rounds", range(5))
async def test_a_call_that_is_cancelled_as_the_buffer_changes_ends(worlds: Callable[..., World], rounds: int) -> None:
    world, pull = await waiting(worlds, run={"steps": 9})
    world.core.batches["model0"].notify()
    for _ in range(rounds):
        await asyncio.sleep(0)
    pull.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert pull.cancelled(), "the call would go on for a rank that has left"
