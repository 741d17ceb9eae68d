"""Dispatch and versions: which replica gets work and announcements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.common.errors import (
    LeaseLostError,
    VersionConflictError,
)
from services.orchestrator.journal import journal
from services.orchestrator.members import AnnounceVersion, Held, PlayGroup
from services.orchestrator.progress import waits
from tests.unit.orchestrator.world import World


async def test_a_replica_with_an_unknown_digest_gets_no_work_and_is_told_to_fetch(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0, digest="right")
    world.train()
    replica = world.join()  # holds version 0 with digest d0
    commands = await world.commands(replica)
    assert [c.version.digest for c in commands if isinstance(c, AnnounceVersion)] == ["right"]
    assert not any(isinstance(c, PlayGroup) for c in commands)
    assert "no replica holds a version" in world.core.dispatcher.waits_for
    world.replica_api.report("a", "1", held={"model0": Held(0, "right")}, num_tokens=0, emission=[])
    assert len(await world.orders(replica)) == 4


async def test_a_replica_that_still_holds_the_version_before_gets_only_what_can_be_trained_in_time(
    worlds: Callable[..., World],
) -> None:
    world = worlds(late="drop")  # batches of 8, max_staleness 1: 16 may be outstanding
    replica, orders = await world.begin()
    assert "staleness quota full (model0: 16 of 16)" in world.core.dispatcher.waits_for
    for order in orders[:2]:
        await world.play(order)
    await world.pull(1)
    await world.publish(1)  # its batch returns 8, but 8 of version 0 are ahead of any sample of that replica
    assert await world.orders(replica) == []
    assert "only for replicas that hold newer versions" in world.core.dispatcher.waits_for
    world.replica_api.report("a", "1", held={"model0": Held(1, "d1")}, num_tokens=0, emission=[])
    assert len(await world.orders(replica)) == 2


async def test_version_conflicts_and_stale_trainers_are_refused(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.trainer_api.join("model0", "t", 1, 0)
    assert await world.publish(0) == 0
    assert await world.publish(0) == 0
    with pytest.raises(VersionConflictError):
        await world.publish(0, digest="other")
    world.trainer_api.join("model0", "t2", 1, 0)
    with pytest.raises(LeaseLostError):
        await world.publish(0)
    assert await world.publish(0, incarnation="t2") == 0


async def test_an_order_leaves_only_after_its_issue_is_durable(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.01)
    world = worlds()
    replica = world.join()
    await world.publish(0)
    await world.commands(replica)
    with monkeypatch.context() as full:
        full.setattr(world.journal._files, "free_bytes", lambda path: 0)
        world.train()
        while not world.journal.blocked:  # the writer has the issues, and cannot write them
            await asyncio.sleep(0.01)
        assert replica.mailbox is not None and len(replica.mailbox) == 0
        assert replica.assignments and not any(assignment.issued for assignment in replica.assignments.values())
    orders = await world.orders(replica)
    assert [order.task_group_id for order in orders] == list(replica.assignments)
    assert all(assignment.issued for assignment in replica.assignments.values())


async def test_a_version_that_was_replayed_to_other_bits_is_told_with_who_can_play_on(
    worlds: Callable[..., World],
) -> None:
    world = worlds(max_staleness=0)
    await world.publish(0)
    await world.publish(1)
    world.join(number=1)
    with pytest.raises(VersionConflictError, match="wait for the next version"):
        await world.publish(1, digest="other")
    (told,) = [wait for wait in waits(world.core) if "other bits" in wait]
    assert "version 1 of model0" in told and "rollmill export" in told
    await world.publish(2)
    assert not [wait for wait in waits(world.core) if "other bits" in wait], "replicas fetch version 2"
