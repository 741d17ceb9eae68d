"""Damage in a segment costs the records that had the bytes, and is named."""

from __future__ import annotations

import errno
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from services.common.errors import CorruptDataError
from services.orchestrator.journal import segments
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import (
    Damage,
    DamageReason,
    Packer,
    scan,
    segment_path,
    sizes_in,
    write_header,
)
from tests.unit.orchestrator.journal.helpers import (
    COUNT,
    KINDS,
    damage,
    kept,
    write,
)


def record(number: int = 900, time: float = 1.0, key: str = "forged", line: bytes = b'{"n":900}\n') -> bytes:
    payload = Packer().pack(line)
    return write_header(number, time, key, payload) + payload


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def intact(directory: Path, kind: str) -> list[str]:
    """Keys of a segment's records that a scan finds and whose contents match."""
    data = segment_path(directory, kind, 1).read_bytes()
    rows = [row for row in scan(directory, kind, 1) if not isinstance(row, Damage)]
    return [r.key for r in rows if segments.checksum_of(data[r.offset : r.offset + r.length]) == r.checksum]


async def test_a_flipped_bit_costs_one_record_wherever_it_is(tmp_path: Path) -> None:
    await write(tmp_path, 0, 10)
    path = segment_path(tmp_path, "things", 1)
    data, before = path.read_bytes(), intact(tmp_path, "things")
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, at % 8))
        assert len(set(before) - set(intact(tmp_path, "things"))) == 1, f"byte {at}"


async def test_a_segment_cut_anywhere_keeps_the_records_before_the_cut(tmp_path: Path) -> None:
    await write(tmp_path, 0, 10)
    path = segment_path(tmp_path, "things", 1)
    data, before = path.read_bytes(), intact(tmp_path, "things")
    ends = [row.offset + row.length for row in scan(tmp_path, "things", 1) if not isinstance(row, Damage)]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert intact(tmp_path, "things") == before[: sum(end <= size for end in ends)]


async def test_bytes_taken_out_of_the_middle_cost_the_records_that_had_them(tmp_path: Path) -> None:
    """Also the next record's header, which a scan by the length in the previous header would skip."""
    await write(tmp_path, 0, 10)
    path = segment_path(tmp_path, "things", 1)
    data, before = path.read_bytes(), intact(tmp_path, "things")
    rows = [row for row in scan(tmp_path, "things", 1) if not isinstance(row, Damage)]
    begins = [0, *(row.offset + row.length for row in rows)]
    draw = random.Random(3)
    for _ in range(300):
        begin = draw.randrange(len(data) - 1)
        end = min(len(data), begin + draw.randint(1, 200))
        path.write_bytes(data[:begin] + data[end:])
        touched = {key for key, a, b in zip(before, begins, begins[1:], strict=False) if a < end and begin < b}
        assert set(before) - set(intact(tmp_path, "things")) <= touched, (begin, end)


@pytest.mark.parametrize("spoil", ["flip", "cut", "zeros", "garbage behind"])
async def test_damage_is_named_costs_itself_and_is_left_alone(tmp_path: Path, spoil: str) -> None:
    draw = random.Random(spoil)
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        await write(directory, 0, COUNT)
        path = segment_path(directory, "others", 1)
        data = path.read_bytes()
        at = draw.randrange(len(data))
        spoiled = {
            "flip": flipped(data, at),
            "cut": data[:at],
            "zeros": data[:at] + bytes(100) + data[at + 100 :],
            "garbage behind": data + draw.randbytes(50),
        }[spoil]
        path.write_bytes(spoiled)
        await write(directory, COUNT, 2)
        assert path.read_bytes() == spoiled, "nothing is deleted that could not be read"
        found = kept(directory)
        assert found == sorted(set(found)) and found[-2:] == [COUNT, COUNT + 1]
        lost = set(range(COUNT)) - set(found)
        assert lost <= {n for n in range(COUNT) if KINDS[n % 2] == "others"}
        assert len(lost) <= {"flip": 1, "zeros": 4, "garbage behind": 0}.get(spoil, COUNT)
        with closing(JournalReader(directory)) as reader:
            for row in reader.rows():
                reader.load(row)
            assert {span.kind for span in reader.damage()} <= {"others"}
            assert reader.damage() or not lost
            missing = {n for first, last in reader.gaps() for n in range(first, last + 1)}
            unreadable = {span.number for span in reader.damage() if span.reason is DamageReason.CHECKSUM}
        told = {n - 1 for n in missing | unreadable}
        if spoil in ("cut", "zeros"):  # that there was a last record of all is not known any more
            lost.discard(COUNT - 1)
            told.discard(COUNT - 1)
        assert told == lost, "every lost record is told by its number"


async def test_a_segment_under_two_numbers_is_read_once(tmp_path: Path) -> None:
    await write(tmp_path, 0, 20)
    shutil.copy(segment_path(tmp_path, "things", 1), segment_path(tmp_path, "things", 7))
    assert {(span.segment, span.reason) for span in damage(tmp_path)} == {(7, DamageReason.REPEATED)}
    assert kept(tmp_path) == list(range(20))


async def test_records_of_a_later_format_are_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FORMAT", 2)
    await write(tmp_path, 0, 2)
    before = {place: segment_path(tmp_path, *place).read_bytes() for place in sizes_in(tmp_path)}
    monkeypatch.setattr(segments, "FORMAT", 1)
    with pytest.raises(CorruptDataError, match="format 2, and this release reads format 1"):
        Journal(tmp_path)
    assert {place: segment_path(tmp_path, *place).read_bytes() for place in sizes_in(tmp_path)} == before


async def test_a_place_that_the_disk_cannot_read_costs_what_follows_in_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(tmp_path, 0, COUNT)
    path, real = segment_path(tmp_path, "others", 1), os.pread
    inode = path.stat().st_ino

    def pread(fd: int, length: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset + length > 1000:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr("services.orchestrator.journal.segments._READ_BYTES", 100)
    assert [(span.kind, span.reason) for span in damage(tmp_path)] == [("others", DamageReason.UNREADABLE)]
    found = kept(tmp_path)
    assert [n for n in found if n % 2 == 0] == list(range(0, COUNT, 2))
    assert 0 < sum(n % 2 for n in found) < COUNT // 2


async def test_a_segment_that_is_deleted_while_it_is_looked_at_fails_nothing(tmp_path: Path) -> None:
    """As retention does beside a reader."""
    await write(tmp_path, 0, COUNT)
    sizes = sizes_in(tmp_path)
    segment_path(tmp_path, "others", 1).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.orchestrator.journal.reader.sizes_in", lambda directory: sizes)
        assert kept(tmp_path) == list(range(0, COUNT, 2))
    assert kept(tmp_path) == list(range(0, COUNT, 2))


@pytest.mark.parametrize(
    "forged",
    [
        record(number=2**64 - 1),
        record(number=2**63),
        record(number=0),
        record(time=float("nan")),
        record(line=b"[1]\n"),
        record(line=b"no json\n"),
        record(line=b'{"n":901}\n')[:-3],
    ],
    ids=["largest number", "number beyond SQLite", "number 0", "no time", "a list", "no JSON", "torn"],
)
async def test_a_record_that_no_journal_writes_stops_no_start(tmp_path: Path, forged: bytes) -> None:
    """Its hashes are right: the record is forged."""
    await write(tmp_path, 0, 6)
    path = segment_path(tmp_path, "things", 1)
    path.write_bytes(path.read_bytes() + forged)
    await write(tmp_path, 6, 2)
    assert kept(tmp_path) == list(range(8))
    with closing(JournalReader(tmp_path)) as reader:
        for row in reader.rows():
            reader.load(row)
        assert [span.kind for span in reader.damage()] == ["things"]
