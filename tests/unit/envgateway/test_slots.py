"""Removing the files of untrusted code, and no other file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare.slots import Slot, remove_tree
from tests import needs
from tests.deep_trees import make_deep
from tests.running import is_running
from tests.waiting import WAIT_S, wait_until


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_tree_that_resists_opens_no_directory_above(tmp_path: Path) -> None:
    above = tmp_path / "above"
    tree = above / "tree"
    tree.mkdir(parents=True)
    above.chmod(0o555)
    remove_tree(str(tree))
    assert _mode(above) == 0o555
    assert tree.exists() is (os.getuid() != 0)  # root removes it


@pytest.mark.parametrize("is_closed", [False, True])
def test_links_are_removed_and_not_followed(tmp_path: Path, is_closed: bool) -> None:
    target = tmp_path / "target"
    target.write_text("x")
    target.chmod(0o644)
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    for directory in (tree, tree / "inner"):
        (directory / "link").symlink_to(target)
        (directory / "above").symlink_to(tmp_path)
    if is_closed:
        (tree / "inner").chmod(0)
    remove_tree(str(tree))
    assert not tree.exists() and _mode(target) == 0o644
    link = tmp_path / "link"
    link.symlink_to(target)
    remove_tree(str(link))
    assert not link.is_symlink() and _mode(target) == 0o644


def _deep(work: Path) -> None:
    (work / ".flat-1").mkdir()
    (work / ".flat-1" / "in-the-way").touch()
    make_deep(work, 1200)  # deeper than a stack, and than a name


def _wide(work: Path) -> None:
    for number in range(300):
        (work / f"f{number}").touch()


def _closed(work: Path) -> None:
    _wide(work)
    work.chmod(0)


def _is_wiped(slot: Slot) -> bool:
    try:
        slot.wipe()
    except BlockingIOError:
        return False
    return True


def _wiped_beside_the_supervisor(directory: Path, fill: Callable[[Path], None], kill: bool = False) -> None:
    """``kill``: the process that removes the files, at once."""
    slot = Slot(0, os.getuid(), 0, "0", str(directory))
    fill(Path(slot.work_dir))
    with pytest.raises(BlockingIOError):
        slot.wipe()
    if kill:
        assert slot.remover is not None
        os.kill(slot.remover, signal.SIGKILL)
    wait_until(lambda: _is_wiped(slot), "the tree is removed")
    assert os.listdir(slot.directory) == ["work"] and os.listdir(slot.work_dir) == []


def _removals_beside_the_supervisor(directory: Path) -> None:
    for fill in (_deep, _wide, _closed):
        (directory / fill.__name__).mkdir()
        _wiped_beside_the_supervisor(directory / fill.__name__, fill)
    (directory / "killed").mkdir()
    _wiped_beside_the_supervisor(directory / "killed", _deep, kill=True)


def test_large_trees_are_removed_beside_the_supervisor_also_after_the_death_of_the_remover(deep_path: Path) -> None:
    """In a new interpreter: a supervisor has one thread when it forks, the process of the tests may have more."""
    process = multiprocessing.get_context("spawn").Process(target=_removals_beside_the_supervisor, args=(deep_path,))
    process.start()
    process.join(120)
    exit_code = process.exitcode
    process.kill()
    assert exit_code == 0, "its trace is on stderr"


def test_at_its_start_the_supervisor_waits_for_the_removal(tmp_path: Path) -> None:
    slot = Slot(0, os.getuid(), 0, "0", str(tmp_path))
    _wide(Path(slot.work_dir))
    slot.wipe(at_once=True)
    assert os.listdir(slot.directory) == ["work"] and os.listdir(slot.work_dir) == []


_STOPS_ITS_USER = """
import os, signal, sys
os.setgroups([])
os.setresgid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
os.write(1, b"x")
while True:
    try:
        os.kill(-1, int(sys.argv[2]))
    except OSError:
        pass
"""


_ENDS_A_USER = """
import sys
from services.envgateway.sandbox.bare.slots import kill_user
kill_user(int(sys.argv[1]))
"""


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_program_cannot_stop_the_process_that_kills_it(sign: signal.Signals) -> None:
    if os.getuid() != 0:
        needs.unmet("root", "slots have users of their own")
    uid = 60_500 + os.getpid() % 400
    for _ in range(4):
        program = subprocess.Popen(
            [sys.executable, "-c", _STOPS_ITS_USER, str(uid), str(int(sign))], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        program.stdout.read(1)
        ender = subprocess.Popen([sys.executable, "-c", _ENDS_A_USER, str(uid)])
        try:
            ended = ender.wait(WAIT_S) == 0
        except subprocess.TimeoutExpired:
            ended = False
            for helper in Path(f"/proc/{ender.pid}/task/{ender.pid}/children").read_text().split():
                os.kill(int(helper), signal.SIGKILL)
            ender.wait(WAIT_S)
        program.kill()
        assert program.wait(WAIT_S) == -signal.SIGKILL
        program.stdout.close()
        assert ended, "the helper was stopped, and with it the supervisor that waits for it"


SUPERVISOR = """
import os, sys, time
from services.envgateway.sandbox.bare import confinement as jail
supervisor, call = os.getpid(), jail._libc.prctl
def late(*arguments):
    while os.path.exists(f"/proc/{supervisor}"):
        time.sleep(0.001)
    return call(*arguments)
jail._libc.prctl = late
print(jail.PidNamespace().pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.needs("sandbox tier 2")
def test_a_namespace_ends_with_a_supervisor_that_dies_before_the_first_process_asks_for_that() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        first = int(supervisor.stdout.readline())
        supervisor.kill()
    try:
        wait_until(lambda: not is_running(first), "the end of the namespace's first process")
    finally:
        if is_running(first):
            os.kill(first, signal.SIGKILL)
