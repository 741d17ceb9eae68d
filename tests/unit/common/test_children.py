"""Child processes: groups end as a whole, a child that fails an exchange is lost, and a message tells how a child ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing

from services.common.system.processes import (
    TAIL_BYTES,
    AnsweringChild,
    ChildLostError,
    end,
    end_group,
    last_lines,
    process_group,
)
from tests.running import is_running
from tests.waiting import WAIT_S


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while is_running(pid):
            await asyncio.sleep(0.01)


async def until_written(path: Path) -> int:
    async with asyncio.timeout(WAIT_S):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)
    return int(path.read_text())


LEAVES = "sleep 60 > /dev/null & echo $! > {folder}/child; "


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


async def test_a_block_ends_while_a_process_that_left_the_group_holds_the_pipes(tmp_path: Path) -> None:
    leaves = f"setsid sleep 60 & echo $! > {tmp_path}/child; wait"
    left = 0
    try:
        async with asyncio.timeout(WAIT_S):
            async with process_group("/bin/sh", "-c", leaves, stdout=asyncio.subprocess.PIPE) as process:
                left = await until_written(tmp_path / "child")
                async with asyncio.timeout(WAIT_S):
                    while os.getpgid(left) == process.pid:
                        await asyncio.sleep(0.01)
        assert process.returncode == -signal.SIGKILL and is_running(left)
        assert process.stdout is not None and await process.stdout.read() == b""
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, which no child of these tests has started."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


async def test_a_block_that_ends_after_its_process_kills_no_later_process_with_its_number(
    other: subprocess.Popen[bytes],
) -> None:
    async with process_group("true") as process:
        await process.wait()
        process.pid = other.pid  # as the kernel gives the number of an ended process again
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.1)


async def test_a_block_that_ends_after_its_process_kills_what_is_left_of_its_group(tmp_path: Path) -> None:
    async with process_group("/bin/sh", "-c", LEAVES.format(folder=tmp_path)) as process:
        await process.wait()
    await until_gone(await until_written(tmp_path / "child"))


@pytest.mark.parametrize(
    ("program", "input_", "grace_s", "code"),
    [
        ("echo; read line; exit 3", asyncio.subprocess.PIPE, WAIT_S, 3),
        ("trap 'exit 4' TERM; echo; while :; do sleep 0.01; done", None, WAIT_S, 4),
        ("trap '' TERM; echo; while :; do sleep 0.01; done", asyncio.subprocess.PIPE, 0.1, -signal.SIGKILL),
    ],
)
async def test_a_group_with_a_grace_ends_at_its_input_at_sigterm_or_at_sigkill(
    program: str, input_: int | None, grace_s: float, code: int
) -> None:
    pipes = {"stdin": input_, "stdout": asyncio.subprocess.PIPE}
    async with process_group("/bin/sh", "-c", program, grace_s=grace_s, **pipes) as process:
        assert process.stdout is not None
        await process.stdout.readline()
    assert process.returncode == code


async def test_a_cancelled_grace_leaves_no_process() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60", stdin=asyncio.subprocess.PIPE, start_new_session=True)
    ending = asyncio.create_task(end_group(process, WAIT_S))
    await asyncio.sleep(0.01)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL


class Unkillable(subprocess.Popen[bytes]):
    """As one that a call of the kernel holds up."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "the wait has no deadline"
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_the_wait_for_a_killed_process_has_a_deadline() -> None:
    child = Unkillable(["sleep", "60"])
    with structlog.testing.capture_logs() as logs:
        assert not end(child, 0.01)
    assert [entry["event"] for entry in logs] == ["child.not_ended"]
    assert subprocess.Popen.wait(child, WAIT_S) == -signal.SIGKILL


def shell(program: str, *, own_group: bool = False) -> AnsweringChild:
    return AnsweringChild("the shell", ["/bin/sh", "-c", program], own_group=own_group)


def test_a_child_answers_each_question_and_ends_at_the_end_of_its_input() -> None:
    child = shell("exec cat")
    assert child.ask("an echo", WAIT_S, {"a": 1}) == {"a": 1}
    assert child.ask("an echo", WAIT_S, {"b": "ä"}) == {"b": "ä"}
    child.close(WAIT_S)
    assert child.poll() == 0


@pytest.mark.parametrize("program", ["exit 3", "printf '{\"half\": 1'"])
def test_a_child_that_ends_without_a_whole_line_is_lost(program: str) -> None:
    child = shell(program)
    with pytest.raises(ChildLostError, match="the shell ended during its start"):
        child.ask("its start", WAIT_S)
    child.close()


def test_a_silent_child_is_killed_so_that_no_late_answer_meets_a_later_question() -> None:
    child = shell("exec sleep 60")
    with pytest.raises(ChildLostError, match=r"an answer took longer than 0.1 s"):
        child.ask("an answer", 0.1, {"a": 1})
    child.wait(WAIT_S)
    assert child.poll() == -signal.SIGKILL
    with pytest.raises(ChildLostError, match="ended during another answer"):
        child.ask("another answer", WAIT_S, {"a": 2})
    child.close()


async def test_a_child_that_ends_in_an_exchange_leaves_nothing_of_its_group(tmp_path: Path) -> None:
    child = shell(LEAVES.format(folder=tmp_path) + "exit 3", own_group=True)
    with pytest.raises(ChildLostError, match="ended during its start"):
        child.ask("its start", WAIT_S)
    await until_gone(await until_written(tmp_path / "child"))
    child.close()


def test_a_program_that_does_not_exist_is_a_lost_child() -> None:
    with pytest.raises(ChildLostError, match="the program could not be started"):
        AnsweringChild("the program", ["/does/not/exist"])


def test_a_child_that_ignores_the_end_of_its_input_is_killed_after_the_grace() -> None:
    child = shell("exec sleep 60")
    with pytest.raises(ChildLostError, match=r"the shell has not ended within 0.05 s"):
        child.wait(0.05)
    child.close(0.05)
    assert child.poll() == -signal.SIGKILL
    child.kill()  # of one that has ended: no effect


def test_last_lines_are_those_since_the_start_and_a_missing_file_has_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    start = log.stat().st_size
    assert last_lines(log, start).endswith("(no output)")
    log.write_text(log.read_text() + "x" * TAIL_BYTES + "\nlast\n")
    assert last_lines(log, start).endswith("\n    last")
    assert "earlier" not in last_lines(log, start)
    assert last_lines(tmp_path / "none").endswith("(no output)")
