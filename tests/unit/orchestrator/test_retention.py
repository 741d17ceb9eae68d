"""Retention deletes segments without needed records, and keeps all others, under concurrent events."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import BatchLostError
from services.orchestrator.journal import entries as records
from services.orchestrator.journal.journal import Journal, collect
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import COLLECTED, Row, scan, segment_path
from tests.unit.orchestrator.builders import sequence, trajectory
from tests.unit.orchestrator.damage import loaded, rows
from tests.unit.orchestrator.journal.helpers import damage, gaps
from tests.unit.orchestrator.world import World

Open = Callable[..., Journal]


async def store(journal: Journal, *names: str) -> None:
    for name in names:
        made = trajectory(name, 0, sequence(num_tokens=50))
        await journal.append(records.TRAJECTORY, f"{name}/0", made)


async def train(journal: Journal, step: int, *names: str, policy: str = "model0") -> None:
    entries = tuple(
        records.BatchEntry(
            sequence_id=f"{name}/0/0", minibatch=0, position=0, group_mean=0.0, group_std=1.0, group_size=1,
            staleness=0, num_tokens=4,
        )
        for name in names
    )  # fmt: skip
    batch = records.BatchRecord(policy=policy, training_step=step, entries=entries, minibatches=())
    await journal.append(records.BATCH, f"{policy}/{step}", batch)


def left(directory: Path) -> list[str]:
    """Task groups with a readable trajectory."""
    with closing(JournalReader(directory)) as reader:
        return [row.key.partition("/")[0] for row in reader.rows_of(records.TRAJECTORY) if reader.load(row)]


async def test_what_a_replay_from_the_oldest_kept_checkpoint_needs_stays(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal(segment_bytes=1)  # a record a segment
    names = ("old", "checkpointed", "replayable", "buffered", "newest")
    await store(journal, *names)
    for step, name in enumerate(names[:3], start=1):
        await train(journal, step, name)
    assert len(collect(journal, {"model0": 2}, live_groups={"buffered"})) == 2
    assert left(tmp_path) == ["replayable", "buffered", "newest"]
    assert not collect(journal, {"model0": 2}, live_groups={"buffered"})


async def filled(journal: Journal) -> None:
    """Ten trajectories in one closed segment."""
    await store(journal, *(f"g{number}" for number in range(10)))
    await journal.close()


async def test_a_segment_stays_as_long_as_one_of_its_records_is_needed(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    assert not collect(journal, {}, {"g3"})
    assert len(left(tmp_path)) == 11
    assert collect(journal, {}, ()) == [(records.TRAJECTORY, 1)]
    assert left(tmp_path) == ["new"]
    assert not gaps(tmp_path) and not damage(tmp_path)  # deleted records are not reported as lost


async def test_a_reader_does_not_take_deleted_records_for_damaged_ones(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    reader = JournalReader(tmp_path)
    found = list(reader.rows_of(records.TRAJECTORY))
    assert reader.load(found[0]) is not None  # holds the file open
    collect(journal, {}, ())
    with closing(JournalReader(tmp_path)) as other:
        assert not any(other.load(row) for row in found if row.key != "new/0")
        assert other.damage() == []
    assert [row.key for row in reader.rows_of(records.TRAJECTORY)] == ["new/0"]
    assert reader.damage() == []
    reader.close()


async def test_a_damaged_segment_is_not_deleted(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    path = segment_path(tmp_path, records.TRAJECTORY, 1)
    data = bytearray(path.read_bytes())
    header = [row for row in scan(tmp_path, records.TRAJECTORY, 1) if isinstance(row, Row)][5]
    data[header.offset - 1] ^= 0xFF
    path.write_bytes(data)
    journal = open_journal()
    await store(journal, "new")
    assert not collect(journal, {}, ())
    assert path.read_bytes() == bytes(data)


@pytest.mark.parametrize("spoil", ["disk", "content"])
async def test_nothing_is_collected_while_a_batch_that_may_be_replayed_cannot_be_read(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    journal = open_journal(segment_bytes=1)
    await store(journal, "trained", "needed", "last")
    await train(journal, 1, "trained")
    if spoil == "content":
        await journal.append(records.BATCH, "model0/2", {"sequences": 7})
    else:
        await train(journal, 2, "needed")
    with monkeypatch.context() as failing:
        if spoil == "disk":
            read = JournalReader._open

            def fail(reader: JournalReader, row: Any) -> int:
                if row.key == "model0/2":
                    raise OSError(errno.EIO, "Input/output error")
                return read(reader, row)

            failing.setattr(JournalReader, "_open", fail)
        assert not collect(journal, {"model0": 1}, ())
    assert left(tmp_path) == ["trained", "needed", "last"]
    assert collect(journal, {"model0": 2}, ()), "no checkpoint needs that batch any more"


async def test_what_is_recorded_after_the_live_groups_were_listed_stays(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal(segment_bytes=1)
    await store(journal, "old", "before")
    current = journal.current_segments()
    await store(journal, "issued later", "newest")  # the segment of the first of them is closed already
    collect(journal, {}, (), current=current)
    assert left(tmp_path) == ["before", "issued later", "newest"]


async def test_states_that_newer_ones_supersede_are_deleted(open_journal: Open, tmp_path: Path) -> None:
    for number in range(3):
        journal = open_journal()
        await journal.append(records.STATE, "", {"n": number})
        if number < 2:
            await journal.close()
    assert collect(journal, {}, ()) == [(records.STATE, 1), (records.STATE, 2)]
    reader = JournalReader(tmp_path)
    assert [reader.load(row) for row in reader.rows_of(records.STATE)] == [{"n": 2}]
    reader.close()


async def test_a_segment_goes_after_its_numbers_are_on_disk_and_stays_where_they_cannot_be(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    done: list[str] = []

    def note(what: str, fails: bool = False) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            done.append(what)

        return call

    with monkeypatch.context() as full:
        full.setattr("os.fsync", note("sync", fails=True))
        with pytest.raises(OSError, match="No space"):
            collect(journal, {}, ())
    assert len(left(tmp_path)) == 11
    with monkeypatch.context() as killed:  # before the segment is gone
        killed.setattr("os.fsync", note("sync"))
        killed.setattr(Path, "unlink", note("unlink"))
        collect(journal, {}, ())
    assert done == ["sync", "sync", "unlink"]
    assert len(left(tmp_path)) == 11 and not gaps(tmp_path) and not damage(tmp_path)
    with (tmp_path / COLLECTED).open("ab") as file:
        file.write(b'\n{"kind": "traj')  # a crash
    assert collect(journal, {}, ()) == [(records.TRAJECTORY, 1)]
    assert left(tmp_path) == ["new"] and not gaps(tmp_path) and not damage(tmp_path)


async def test_a_run_goes_on_where_there_is_no_room_to_make_room(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    await world.publish(0)
    watch = world.watch()
    await watch.tick()
    world.trainer_api.join("model0", "t", 0, 4, kept_checkpoint_steps=[0])
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("services.orchestrator.watch.collect", fail)
    for _ in range(2):  # tried again
        world.clock.now += 10.0
        await watch.tick()
    assert len(calls) == 2


async def test_a_run_deletes_what_no_kept_checkpoint_needs_and_goes_on(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.steps, world.segment_bytes = 6, 1  # a record a segment
    await world.crash()
    await world.publish(0)
    world.train()
    for step in range(1, 5):
        await world.step(step)
    watch = world.watch()
    await watch.tick()  # no trainer has joined: the needed records are unknown
    every = rows(world.run_dir, records.TRAJECTORY)
    world.trainer_api.join("model0", "t", 1, 4, kept_checkpoint_steps=[2, 4])
    world.clock.now += 10.0
    await watch.tick()
    kept = {row.key for row in rows(world.run_dir, records.TRAJECTORY)}
    assert 0 < len(kept) < len(every)
    named = {
        step: {
            e["sequence_id"].rpartition("/")[0]
            for e in loaded(world.run_dir, records.BATCH, f"model0/{step}")[0]["sequences"]
        }
        for step in range(1, 5)
    }
    assert named[3] | named[4] <= kept and not named[1] & kept
    assert world.core.disk.outlook is not None and world.core.disk.outlook.run_bytes > 0
    await world.crash()
    assert len(world.core.aside) == 0
    for step in (3, 4):  # a trainer that falls back to the oldest checkpoint
        assert len((await world.pull(step)).record.entries) == len(named[step])
    with pytest.raises(BatchLostError):
        await world.pull(1)
