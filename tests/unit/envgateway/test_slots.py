"""Removing what a stranger has left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare.slots import kill_user, remove_tree
from tests import needs


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_closed_and_deep_trees_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    deep = tree
    for _ in range(60):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (tree / "closed").mkdir()
    (tree / "closed" / "inner").write_text("x")
    (tree / "closed").chmod(0)
    remove_tree(str(tree))
    assert not tree.exists()


def test_a_tree_that_resists_opens_nothing_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = tmp_path / "above"
    tree = above / "tree"
    tree.mkdir(parents=True)
    above.chmod(0o755)
    kept = os.rmdir

    def rmdir(path: str, *, dir_fd: int | None = None) -> None:
        if str(path) == str(tree):
            raise PermissionError("somebody is faster, or it is mounted")
        kept(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_tree(str(tree))
    assert tree.exists() and _mode(above) == 0o755


def test_links_are_removed_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_text("x")
    target.chmod(0o644)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(target)
    kept, failed = os.unlink, []

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        if str(path).endswith("link") and not failed:
            failed.append(path)
            raise PermissionError("once")
        kept(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    remove_tree(str(tree))
    assert failed and not tree.exists() and _mode(target) == 0o644


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


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_program_cannot_stop_what_ends_it(sign: signal.Signals) -> None:
    if os.getuid() != 0:
        needs.unmet("root", "slots have users of their own")
    uid = 60_500 + os.getpid() % 400
    for _ in range(4):
        program = subprocess.Popen(
            [sys.executable, "-c", _STOPS_ITS_USER, str(uid), str(int(sign))], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        program.stdout.read(1)
        ender = os.fork()
        if ender == 0:
            kill_user(uid)
            os._exit(0)
        deadline = time.monotonic() + 5
        while (ended := os.waitpid(ender, os.WNOHANG)[0]) == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        program.kill()
        if not ended:
            for helper in Path(f"/proc/{ender}/task/{ender}/children").read_text().split():
                os.kill(int(helper), signal.SIGKILL)
            os.waitpid(ender, 0)
        assert program.wait(5) == -signal.SIGKILL
        program.stdout.close()
        assert ended, "the helper was stopped, and with it the supervisor that waits for it"
