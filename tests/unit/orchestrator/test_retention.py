"""Retention deletes and rewrites unneeded records, and keeps all needed ones, under concurrent events."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import BatchLostError, InfrastructureError
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.retention import MOST_REWRITTEN, collect
from services.orchestrator.journal.storage import compaction
from services.orchestrator.journal.storage.index import INDEX_FILE, remove_index
from services.orchestrator.journal.storage.scan import scan
from services.orchestrator.journal.storage.segments import Row, segment_path
from services.orchestrator.journal.writer import Journal
from tests.unit.orchestrator.builders import sequence, trajectory
from tests.unit.orchestrator.damage import loaded, rows
from tests.unit.orchestrator.world import World
from tests.waiting import WAIT_S

Open = Callable[..., Journal]


@pytest.fixture
async def open_journal(tmp_path: Path) -> AsyncIterator[Open]:
    made: list[Journal] = []

    def open_it(**settings: Any) -> Journal:
        made.append(Journal(tmp_path, **settings))
        made[-1].start()
        return made[-1]

    yield open_it
    for journal in made:
        await journal.close()


async def store(journal: Journal, *names: str) -> None:
    for name in names:
        made = trajectory(name, 0, sequence(num_tokens=50))
        await journal.append(records.TRAJECTORY, f"{name}/0", lambda made=made: rollouts.trajectory_to_json(made))


async def train(journal: Journal, step: int, *names: str, policy: str = "model0") -> None:
    entries = tuple(
        records.BatchEntry(
            sequence_id=f"{name}/0/0", minibatch=0, position=0, group_mean=0.0, group_std=1.0, group_size=1,
            staleness=0, num_tokens=4,
        )
        for name in names
    )  # fmt: skip
    batch = records.BatchRecord(policy=policy, training_step=step, entries=entries, minibatches=())
    await journal.append(records.BATCH, f"{policy}/{step}", lambda: records.batch_to_json(batch))


def left(directory: Path) -> list[str]:
    """Task groups with a readable trajectory."""
    reader = JournalReader(directory)
    try:
        return [row.key.partition("/")[0] for row in reader.rows_of(records.TRAJECTORY) if reader.load(row)]
    finally:
        reader.close()


def rows_in(directory: Path, kind: str) -> list[Any]:
    with closing(JournalReader(directory)) as reader:
        return list(reader.rows_of(kind))


def facts(directory: Path) -> tuple[list[Any], list[Any]]:
    reader = JournalReader(directory)
    try:
        return reader.gaps(), reader.damage()
    finally:
        reader.close()


async def test_what_a_replay_from_the_oldest_kept_checkpoint_needs_stays(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal(segment_bytes=1)  # a record a segment
    names = ("old", "checkpointed", "replayable", "buffered", "newest")
    await store(journal, *names)
    for step, name in enumerate(names[:3], start=1):
        await train(journal, step, name)
    assert len(collect(journal, {"model0": 2}, live_groups={"buffered"}).removed) == 2
    assert left(tmp_path) == ["replayable", "buffered", "newest"]
    assert not collect(journal, {"model0": 2}, live_groups={"buffered"}).removed


async def test_a_trajectory_stays_for_the_policy_that_needs_it_longest(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal(segment_bytes=1)
    await store(journal, "a", "b", "last")
    for step, name in ((1, "a"), (2, "b")):
        await train(journal, step, name)
        await train(journal, step, name, policy="model1")
    collect(journal, {"model0": 2, "model1": 1}, ())
    assert left(tmp_path) == ["b", "last"]


async def filled(journal: Journal) -> None:
    """Ten trajectories in one closed segment, of which two are needed."""
    await store(journal, *(f"g{number}" for number in range(10)))
    await journal.close()


NEEDED = {"g3", "g7"}


async def test_a_segment_in_which_little_is_needed_is_rewritten(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    size = segment_path(tmp_path, records.TRAJECTORY, 1).stat().st_size
    found = collect(journal, {}, NEEDED)
    assert (found.removed, found.rewritten) == ([], [(records.TRAJECTORY, 1)])
    assert left(tmp_path) == ["g3", "g7", "new"]
    assert segment_path(tmp_path, records.TRAJECTORY, 1).stat().st_size < 0.3 * size
    assert facts(tmp_path) == ([], [])  # deleted records are not reported as lost
    assert not collect(journal, {}, NEEDED).rewritten
    await store(journal, "newer")
    await journal.close()
    remove_index(tmp_path / INDEX_FILE)
    journal = open_journal()
    assert left(tmp_path) == ["g3", "g7", "new", "newer"]
    assert journal.damage == [] and facts(tmp_path) == ([], [])


@pytest.mark.parametrize("dies_at", ["prepare", "record", "rename", "index"])
@pytest.mark.parametrize("without_index", [False, True])
async def test_a_process_that_dies_while_rewriting_loses_nothing(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str, without_index: bool
) -> None:
    await filled(open_journal())
    told: list[BaseException] = []
    journal = open_journal(on_failure=told.append)
    await store(journal, "new")

    class DiedError(Exception):
        pass

    def dies(*args: Any, **kwargs: Any) -> None:
        raise DiedError

    real = compaction.take_place
    places = {
        "prepare": ("services.orchestrator.journal.storage.segments.Files.sync", dies),
        "record": ("services.orchestrator.journal.storage.index_keeper.IndexKeeper.replace", dies),
        "rename": ("services.orchestrator.journal.storage.compaction.take_place", dies),
        "index": ("services.orchestrator.journal.storage.compaction.take_place", lambda *args: (real(*args), dies())),
    }
    with monkeypatch.context() as dying:
        dying.setattr(*places[dies_at])
        dying.setattr("services.orchestrator.journal.writer.REMOVE_DEADLINE_S", 0.2)
        with pytest.raises(Exception):  # noqa: B017 - the thread is gone, or the caller hears of it
            await asyncio.to_thread(collect, journal, {}, NEEDED)
    await journal.close()
    assert NEEDED | {"new"} <= set(left(tmp_path)), "read before the next start"
    if without_index:
        remove_index(tmp_path / INDEX_FILE)
    journal = open_journal()
    assert NEEDED | {"new"} <= set(left(tmp_path))
    assert journal.damage == [] and facts(tmp_path)[1] == []
    assert not list(tmp_path.glob("*.compacting"))
    await store(journal, "newer")
    collect(journal, {}, {*NEEDED, "new"})
    assert left(tmp_path) == ["g3", "g7", "new", "newer"]
    assert facts(tmp_path) == ([], [])


async def test_a_reader_finds_records_whose_segment_is_rewritten_under_it(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    reader = JournalReader(tmp_path)
    rows = list(reader.rows_of(records.TRAJECTORY))
    assert reader.load(rows[0]) is not None  # holds the file open
    collect(journal, {}, NEEDED)
    kept = [row for row in rows if row.key.partition("/")[0] in NEEDED]
    assert len(kept) == 2 and all(reader.load(row) for row in kept)
    reader._open_files.clear()  # another reader, with rows from before
    assert all(reader.load(row) for row in kept)
    assert not any(reader.load(row) for row in rows if row not in kept and row.key != "new/0")
    assert reader.damage() == [], "what was collected is not damaged"
    fresh = list(reader.rows_of(records.TRAJECTORY))
    assert all(reader.load(row) for row in fresh) and len(fresh) == 3
    reader.close()


async def test_a_reader_that_looks_while_a_segment_is_rewritten_finds_what_is_needed(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the old file's places and with the new one's, before and after the rename."""
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    reader = JournalReader(tmp_path)
    rows = list(reader.rows_of(records.TRAJECTORY))
    seen: list[list[str]] = []

    def look() -> None:
        for mine in (reader, JournalReader(tmp_path)):
            found = [row for row in mine.rows_of(records.TRAJECTORY) if mine.load(row)]
            seen.append([row.key.partition("/")[0] for row in found])
            assert all(mine.load(row) for row in rows if row.key.partition("/")[0] in NEEDED)
            assert mine.damage() == []
            if mine is not reader:
                mine.close()

    real = compaction.take_place

    def watched(*args: Any) -> None:
        look()
        real(*args)
        look()

    monkeypatch.setattr(compaction, "take_place", watched)
    assert collect(journal, {}, NEEDED).rewritten
    look()
    assert len(seen) == 6 and all(NEEDED | {"new"} <= set(names) for names in seen)
    assert seen[-1] == ["g3", "g7", "new"]
    reader.close()


@pytest.mark.parametrize("needed", [{"g0", "g1"}, {"g9"}, {"g3", "g7"}, {"g8", "g9"}])
async def test_an_index_of_before_a_segment_was_rewritten_does_not_mislead(
    open_journal: Open, tmp_path: Path, needed: set[str]
) -> None:
    await filled(open_journal())
    shutil.copy(tmp_path / INDEX_FILE, tmp_path / "old")
    reader = JournalReader(tmp_path)
    reader._use_private(Exception("locked"))  # another copy of that time
    journal = open_journal()
    await store(journal, "new")
    assert collect(journal, {}, needed).rewritten
    await journal.close()
    expected = [*sorted(needed), "new"]
    assert [row.key.partition("/")[0] for row in reader.rows_of(records.TRAJECTORY) if reader.load(row)] == expected
    assert (reader.damage(), reader.gaps()) == ([], [])
    reader.close()
    remove_index(tmp_path / INDEX_FILE)
    (tmp_path / "old").rename(tmp_path / INDEX_FILE)
    assert open_journal().damage == []
    assert left(tmp_path) == expected and facts(tmp_path) == ([], [])


async def test_a_segment_stays_while_another_process_has_the_index_locked(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    before = segment_path(tmp_path, records.TRAJECTORY, 1).read_bytes()
    with closing(sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(3):
            assert not await asyncio.to_thread(journal.compact_segment, records.TRAJECTORY, 1, {4})
    assert segment_path(tmp_path, records.TRAJECTORY, 1).read_bytes() == before
    assert not list(tmp_path.glob("*.compacting"))
    assert len(rows_in(tmp_path, "collected")) <= 1, "tried again without another record"


async def test_a_rewritten_segment_that_is_cut_afterwards_is_told(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    journal = open_journal()
    await store(journal, "new")
    collect(journal, {}, NEEDED)
    await journal.close()
    path = segment_path(tmp_path, records.TRAJECTORY, 1)
    path.write_bytes(path.read_bytes()[:-10])
    assert [(span.reason, span.num_records) for span in open_journal().damage] == [("torn", 1), ("lost", 1)]
    assert left(tmp_path) == ["g3", "new"]


async def test_a_damaged_segment_is_neither_deleted_nor_rewritten(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    path = segment_path(tmp_path, records.TRAJECTORY, 1)
    data = bytearray(path.read_bytes())
    header = [row for row in scan(tmp_path, records.TRAJECTORY, 1) if isinstance(row, Row)][5]
    data[header.offset - 1] ^= 0xFF
    path.write_bytes(data)
    remove_index(tmp_path / INDEX_FILE)
    journal = open_journal()
    await store(journal, "new")
    found = collect(journal, {}, NEEDED)
    assert not found.removed and not found.rewritten
    assert path.read_bytes() == bytes(data)


async def test_the_torn_end_of_a_segment_does_not_keep_it(open_journal: Open, tmp_path: Path) -> None:
    await filled(open_journal())
    path = segment_path(tmp_path, records.TRAJECTORY, 1)
    path.write_bytes(path.read_bytes() + path.read_bytes()[:60])  # a process died while writing
    journal = open_journal()
    await store(journal, "new")
    assert collect(journal, {}, NEEDED).rewritten
    assert left(tmp_path) == ["g3", "g7", "new"]
    assert facts(tmp_path) == ([], [])


@pytest.mark.parametrize("spoil", ["disk", "content"])
async def test_nothing_is_collected_while_a_batch_that_may_be_replayed_cannot_be_read(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    journal = open_journal(segment_bytes=1)
    await store(journal, "trained", "needed", "last")
    await train(journal, 1, "trained")
    if spoil == "content":
        await journal.append(records.BATCH, "model0/2", lambda: {"sequences": 7})
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
        assert not collect(journal, {"model0": 1}, ()).removed
    assert left(tmp_path) == ["trained", "needed", "last"]
    assert collect(journal, {"model0": 2}, ()).removed, "no checkpoint needs that batch any more"


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
        await journal.append(records.STATE, "", lambda number=number: {"n": number})
        if number < 2:
            await journal.close()
    assert collect(journal, {}, ()).removed == [(records.STATE, 1), (records.STATE, 2)]
    reader = JournalReader(tmp_path)
    assert [reader.load(row) for row in reader.rows_of(records.STATE)] == [{"n": 2}]
    reader.close()


async def test_other_kinds_are_never_collected(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal(segment_bytes=1)
    for kind in (records.GROUP, records.VERDICT, records.FAILURE, records.VERSION, records.EVALUATION):
        for number in range(3):
            await journal.append(kind, f"x/{number}", lambda number=number: {"n": number})
    found = collect(journal, {}, ())
    assert not found.removed and not found.rewritten


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), InfrastructureError("it was not deleted within 60 s")]
)
async def test_a_run_goes_on_where_there_is_no_room_to_make_room(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world = worlds()
    await world.publish(0)
    watch = world.watch()
    await watch.tick()
    world.trainer_api.join("model0", "t", 0, 4, {}, kept_checkpoint_steps=[0])
    calls: list[int] = []

    def fail(*args: Any, most_rewritten: int, **kwargs: Any) -> None:
        calls.append(most_rewritten)
        raise error

    monkeypatch.setattr("services.orchestrator.watch.collect", fail)
    for _ in range(2):  # tried again
        world.clock.now += 10.0
        await watch.tick()
    assert calls == [MOST_REWRITTEN] * 2
    always = property(lambda journal: "0 bytes free", lambda journal, value: None)  # its thread resets it
    monkeypatch.setattr(Journal, "blocked", always, raising=False)
    world.clock.now += 10.0
    await watch.tick()
    assert calls == [MOST_REWRITTEN] * 2 + [0], "a blocked journal deletes, and has no room for rewriting"


async def test_a_run_deletes_what_no_kept_checkpoint_needs_and_goes_on(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.steps, world.segment_bytes = 6, 1  # a record a segment
    await world.crash()
    await world.publish(0)
    world.train()
    for step in range(1, 5):
        for order in await world.orders(world.join(number=step - 1)):
            await world.play(order, version=step - 1)
        await world.trainer_api.pull_batch("model0", step, WAIT_S)
        await world.publish(step)
    watch = world.watch()
    await watch.tick()  # no trainer has joined: the needed records are unknown
    every = rows(world.run_dir, records.TRAJECTORY)
    world.trainer_api.join("model0", "t", 1, 4, {}, kept_checkpoint_steps=[2, 4])
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
    assert len(world.parts.aside) == 0
    for step in (3, 4):  # a trainer that falls back to the oldest checkpoint
        assert len((await world.trainer_api.pull_batch("model0", step, WAIT_S)).record.entries) == len(named[step])
    with pytest.raises(BatchLostError):
        await world.trainer_api.pull_batch("model0", 1, WAIT_S)
