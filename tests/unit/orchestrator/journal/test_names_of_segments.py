"""Names in the journal's directory that are no segments, or no readable ones."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.orchestrator.journal import segments
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.segments import Packer, segment_path, write_header
from tests.unit.orchestrator.journal.helpers import (
    damage,
    gaps,
    kept,
    write,
)

NO_FILES: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "empty file": Path.touch,
}


@pytest.mark.parametrize("what", NO_FILES)
async def test_a_name_of_a_segment_that_is_no_file_costs_only_what_was_there(tmp_path: Path, what: str) -> None:
    await write(tmp_path, 0, 20)
    await write(tmp_path, 20, 20)
    for number in (1, 3):  # in the place of a segment, and where the next one would be
        path = segment_path(tmp_path, "things", number)
        path.unlink(missing_ok=True)
        NO_FILES[what](path)
    expected = [n for n in range(40) if n % 2 or n >= 20]
    assert kept(tmp_path) == expected, "read without a writer"
    for life in range(2):
        await write(tmp_path, 40 + life, 1, durability="power")
    assert kept(tmp_path) == [*expected, 40, 41]
    assert len(gaps(tmp_path)) == 10
    if what != "empty file":
        assert {span.segment for span in damage(tmp_path)} >= {3}


async def test_a_segment_with_the_highest_number_of_a_name_does_not_hide_what_is_written_later(tmp_path: Path) -> None:
    await write(tmp_path, 0, 6)
    for number in (10**12 - 1, 10**15 - 1):
        shutil.copy(segment_path(tmp_path, "things", 1), segment_path(tmp_path, "things", number))
    for life in range(3):
        await write(tmp_path, 6 + life, 1)
    assert kept(tmp_path) == list(range(9))


async def test_a_start_behind_the_highest_number_of_a_record_is_refused(tmp_path: Path) -> None:
    """Later records could not be read back."""
    await write(tmp_path, 0, 6)
    payload = Packer().pack(b'{"n":6}')
    with segment_path(tmp_path, "things", 1).open("ab") as file:
        file.write(write_header(segments.MAX_NUMBER - 1, 1.0, "k6", payload) + payload)
    with pytest.raises(ConfigError, match="which no run reaches"):
        Journal(tmp_path)
    assert kept(tmp_path) == list(range(7))


async def test_a_segment_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(tmp_path, 0, 6)
    forbidden = segment_path(tmp_path, "things", 1)
    opened = Path.open

    def refuse(path: Path, *arguments: object, **named: object) -> object:
        if path == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(ConfigError, match=forbidden.name):
            Journal(tmp_path)
    assert kept(tmp_path) == list(range(6))


async def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    await write(tmp_path, 0, 6)
    names = ("things-99999999999999999999.jsonl.zst", "things-1.jsonl.zst", "Things-000001.jsonl.zst", "notes.txt")
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    await write(tmp_path, 6, 2)
    assert kept(tmp_path) == list(range(8))
    assert all((tmp_path / name).read_bytes() == b"mine" for name in names)
