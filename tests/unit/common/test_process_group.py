"""A group of processes ends with the block that started it, also when that is cancelled while the first one starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.process_group import process_group

WAIT_S = 15.0


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (stat := Path(f"/proc/{pid}/stat")).exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            await asyncio.sleep(0.01)


async def until_written(path: Path) -> int:
    async with asyncio.timeout(WAIT_S):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)
    return int(path.read_text())


def program(folder: Path) -> tuple[str, ...]:
    """A shell that starts a child and tells its process id."""
    return "/bin/sh", "-c", f"sleep 60 & echo $! > {folder}/child; wait"


async def test_a_block_that_ends_leaves_no_child_of_the_process(tmp_path: Path) -> None:
    async with process_group(*program(tmp_path)) as process:
        child = await until_written(tmp_path / "child")
    assert process.returncode == -9
    await until_gone(child)


async def test_a_cancellation_while_the_process_starts_leaves_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started, may_go_on = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def slow(*command: str, **options: bool) -> asyncio.subprocess.Process:
        process = await real(*command, **options)  # type: ignore[arg-type]
        started.set()
        await may_go_on.wait()
        return process

    async def play() -> None:
        async with process_group(*program(tmp_path)):
            raise AssertionError("it was cancelled before")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    playing = asyncio.create_task(play())
    await asyncio.wait_for(started.wait(), WAIT_S)
    child = await until_written(tmp_path / "child")
    playing.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until_gone(child)
