from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.kept_tokens import left_out_row, pack
from services.common.records import NO_TIMING, RolloutFailure, RolloutPhase, RolloutTiming, Trajectory
from services.orchestrator.journal import entries
from services.orchestrator.journal import journal as journal_module
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.segments import Files, segment_path
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.journal.helpers import kept
from tests.waiting import WAIT_S, until

Open = Callable[..., Journal]

TIMING = RolloutTiming(
    accepted_at=1.5,
    sent_at=9.25,
    num_sends=2,
    num_retries=1,
    phases=(RolloutPhase(what="generate", begin_s=0.5, seconds=2.5, policy="model0", num_tokens=7, last_version=3),),
)


async def put(journal: Journal, *numbers: int) -> None:
    await asyncio.gather(*(journal.append("things", str(n), {"n": n}) for n in numbers))


async def test_what_is_durable_is_there_for_the_next_process_in_order(open_journal: Open, tmp_path: Path) -> None:
    journal = open_journal()
    await put(journal, *range(200))
    assert kept(tmp_path) == list(range(200))  # without closing: as after kill -9
    again = open_journal()
    await put(again, 200)
    assert kept(tmp_path) == list(range(201))


async def test_group_commit_takes_at_most_64_records(open_journal: Open) -> None:
    journal = open_journal()
    await put(journal, *range(640))
    assert 10 <= journal.num_commits <= 64


class Disk(Files):
    """A disk with ``free`` bytes, of which the next writes fail half way with ``errors``."""

    def __init__(self, *errors: int) -> None:
        self.free = 10**9
        self.errors = list(errors)

    def free_bytes(self, path: Path) -> int:
        return self.free

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.errors:
            super().write(fd, data[:3], offset)
            raise OSError(number := self.errors.pop(), os.strerror(number))
        super().write(fd, data, offset)


async def test_without_free_disk_nothing_is_acknowledged_and_nothing_is_lost(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    disk = Disk()
    journal = open_journal(files=disk)
    await put(journal, 1)
    disk.free = 0
    waiting = asyncio.ensure_future(put(journal, 2, 3))
    await until(lambda: journal.blocked)
    assert not waiting.done()
    assert "0 bytes free" in journal.blocked
    disk.free = 10**9
    await asyncio.wait_for(waiting, WAIT_S)
    assert journal.blocked == ""
    assert kept(tmp_path) == [1, 2, 3]


async def test_a_write_that_fails_half_way_is_undone_and_tried_again(
    open_journal: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    disk = Disk()
    journal = open_journal(files=disk)
    await put(journal, 1)
    disk.errors = [errno.ENOSPC] * 3
    await asyncio.wait_for(put(journal, 2, 3), WAIT_S)
    assert kept(tmp_path) == [1, 2, 3]
    with zstandard.open(segment_path(tmp_path, "things", 1), "rt") as lines:
        assert [json.loads(line)["n"] for line in lines] == [1, 2, 3]


async def test_another_failure_of_the_disk_stops_the_process(open_journal: Open) -> None:
    told: list[BaseException] = []
    journal = open_journal(on_failure=told.append, files=Disk(errno.EIO))
    journal.submit("things", "1", {})
    await until(lambda: told)
    with pytest.raises(Exception, match="the journal has failed"):
        journal.submit("things", "2", {})


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
@settings(max_examples=300)
def test_packed_arrays_come_back_bit_by_bit(bits: list[int]) -> None:
    """NaN with its payload, infinities, negative zeros and token ids that no vocabulary has, too."""
    words = np.array(bits, dtype=np.uint32)
    assert entries.unpack_floats(entries.pack_floats(words.view(np.float32))).tobytes() == words.tobytes()
    for ids in (words.view(np.int32), words.view(np.int32) & 0xFFFFFF):
        text = entries.pack_tokens(ids)
        assert entries.unpack_tokens(text, len(ids)).tolist() == ids.tolist()


@pytest.mark.parametrize(("text", "count"), [("AAAA", 2), ("", 1), ("AAAAAAAA", 1), ("A", 1), ("\u00e9", 1)])
def test_an_array_of_another_length_is_refused(text: str, count: int) -> None:
    with pytest.raises(CorruptDataError, match="an array of a record"):
        entries.unpack_tokens(text, count)


def through_json(value: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    return loaded


def test_trajectories_and_failures_come_back_as_they_were() -> None:
    cut = sequence(0.5, 7, 40)
    kept = pack([left_out_row([3, 300_000])] * 40, 40)
    cut = replace(cut, segments=(*cut.segments[:-1], replace(cut.segments[-1], kept=kept, temperature=0.7)))
    scored = np.linspace(-7.0, -1e-7, 40, dtype=np.float32)
    cut = replace(cut, segments=(*cut.segments[:-1], replace(cut.segments[-1], teacher_logprobs=scored)))
    whole = trajectory("g", 3, cut, sequence(1.0, 8, policy="b", role="checker"), reward=0.25)
    back = entries.from_json(Trajectory, through_json(entries.to_json(whole)))
    for before, after in zip(whole.sequences, back.sequences, strict=True):
        assert (before.policy, before.role, before.reward) == (after.policy, after.role, after.reward)
        for left, right in zip(before.segments, after.segments, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.logprobs.tobytes() == right.logprobs.tobytes()
            assert left.teacher_logprobs.tobytes() == right.teacher_logprobs.tobytes()
            assert left.weight_version == right.weight_version
            assert (left.kept, left.temperature) == (right.kept, right.temperature)
    failed = replace(failure("g", 1), started_at=1.0, finished_at=2.0, timing=TIMING)
    assert entries.from_json(RolloutFailure, through_json(entries.to_json(failed))) == failed
    timed = entries.from_json(Trajectory, through_json(entries.to_json(replace(whole, timing=TIMING))))
    assert timed.timing == TIMING


async def test_segments_can_be_opened_as_datasets(open_journal: Open, tmp_path: Path) -> None:
    import datasets

    journal = open_journal()
    for index in range(3):
        made = replace(trajectory("g", index, reward=float(index)), timing=TIMING if index else NO_TIMING)
        await journal.append(entries.TRAJECTORY, f"g/{index}", made)
    path = str(segment_path(tmp_path, entries.TRAJECTORY, 1))
    loaded = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["reward"][:] == [0.0, 1.0, 2.0]


async def test_a_record_that_is_awaited_does_not_wait_for_others(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LINGER_S", 3600.0)
    journal = open_journal()
    written: list[str] = []
    async with asyncio.timeout(WAIT_S):
        await put(journal, 1)
        for name in ("a", "b"):
            journal.submit("things", name, {}, written.append, name)
        await put(journal, 2)
        assert written == ["a", "b"], "it takes along, in order, what was submitted before"
        journal.submit("things", "c", {}, written.append, "c")
        await journal.close()
    assert written == ["a", "b", "c"], "closing ends the lingering as well"
