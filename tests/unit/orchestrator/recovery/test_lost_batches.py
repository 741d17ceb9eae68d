"""A damaged record of a version or a batch: nothing is trained twice, and training goes on."""

from __future__ import annotations

import pytest

from services.common.errors import BatchLostError, CorruptDataError, DeadlineError
from services.common.records import SetAsideReason
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from tests.unit.orchestrator.damage import flip, loaded
from tests.unit.orchestrator.recovery.helpers import (
    Make,
    set_aside,
    spoiled,
    trains_on,
)


async def test_a_damaged_record_of_a_superseded_version_stops_nothing(worlds: Make) -> None:
    lost, world = 1, worlds()
    world.steps = 6
    await world.crash()
    await world.begin()
    for step in (1, 2, 3):
        await world.step(step)
    await spoiled(world, entries.VERSION, f"model0/{lost}")
    ledger = world.core.ledgers["model0"]
    assert ledger.newest_number == 3 and lost not in ledger.versions and not ledger.lacks_newest
    assert world.core.batches["model0"].newest_version == 3
    assert set_aside(world) == [(entries.VERSION, f"model0/{lost}", SetAsideReason.DAMAGED)]
    await trains_on(world, 4)


async def test_the_trainer_offers_a_newest_version_again_whose_record_is_damaged(worlds: Make) -> None:
    world = worlds()
    world.steps = 6
    await world.crash()
    await world.begin()
    await world.step(1)
    await world.step(2)
    await world.journal.close()
    flip(world.run_dir, entries.VERSION, "model0/1")
    flip(world.run_dir, entries.VERSION, "model0/2")
    world.core.metrics.close()
    world.open()
    ledger = world.core.ledgers["model0"]
    assert ledger.newest_number == 2 and ledger.lacks_newest and ledger.newest is None
    assert world.core.batches["model0"].newest_version == 2
    replica = world.join(number=2)
    world.train()
    assert await world.orders(replica) == []  # the digest of version 2 is unknown
    assert await world.publish(2) == 2
    assert not ledger.lacks_newest
    assert len(await world.orders(replica)) > 0
    await trains_on(world, 3)


async def test_a_damaged_batch_that_was_not_trained_is_put_together_again_of_other_sequences(worlds: Make) -> None:
    world = worlds()
    for order in (await world.begin())[1]:
        await world.play(order)
    first = {entry.sequence_id for entry in (await world.pull(1)).record.entries}
    await spoiled(world, entries.BATCH, "model0/1")
    assert world.core.batches["model0"].newest_step == 0
    with pytest.raises(DeadlineError):
        await world.trainer_api.pull_batch("model0", 1, 0.05)
    await trains_on(world, 1)
    found = loaded(world.run_dir, entries.BATCH, "model0/1")
    assert len(found) == 1 and not first & {entry["sequence_id"] for entry in found[0]["sequences"]}
    await world.crash()  # no batch in memory
    again = await world.pull(1)  # the record that can be read
    assert {entry.sequence_id for entry in again.record.entries} == {e["sequence_id"] for e in found[0]["sequences"]}


async def test_a_recorded_batch_is_served_without_what_of_it_is_lost(worlds: Make) -> None:
    world = worlds(minibatches=2)
    for order in (await world.begin())[1]:
        await world.play(order)
    whole = await world.pull(1)
    lost = whole.record.entries[0].sequence_id
    await spoiled(world, entries.TRAJECTORY, lost.rpartition("/")[0])
    left = await world.pull(1)
    share = left.share(0, 1)
    assert {s.sequence_id for s in share.sequences} == {e.sequence_id for e in whole.record.entries} - {lost}
    assert sum(totals.num_sequences for totals in share.minibatches) == 7
    assert sum(totals.num_trained_tokens for totals in share.minibatches) == 7 * 4
    assert world.core.counters["sequences_lost"] == 1
    reader = JournalReader(world.run_dir / "journal")
    with pytest.raises(CorruptDataError, match="lacks trajectories"):
        read_batch(reader, "model0", 1)  # `rollmill replay` compares digests, which needs the whole batch
    reader.close()


async def test_a_batch_of_which_nothing_is_left_is_named_as_lost(worlds: Make) -> None:
    world = worlds()
    for order in (await world.begin())[1]:
        await world.play(order)
    await world.pull(1)
    await world.publish(1)
    await world.crash()
    for path in (world.run_dir / "journal").glob("trajectories-*"):
        path.unlink()
    with pytest.raises(BatchLostError, match="no trajectory of the batch of step 1 of model0 can be used"):
        await world.pull(1)


async def test_a_part_that_is_not_in_the_damaged_batch_for_sure_is_not_trained(worlds: Make) -> None:
    """A group of two policies waits for one of them; the other's batch, which may have had the group, is lost."""
    world = worlds(policies=("model0", "model1"))
    for order in (await world.begin())[1]:
        await world.play(order)
    await world.pull(1)
    await spoiled(world, entries.BATCH, "model0/1")
    assert world.core.experience.buffers["model0"].num_sequences == 0
    assert world.core.experience.buffers["model1"].num_sequences == 16
    assert world.core.counters["sequences_set_aside"] == 16
