"""What a fork server does before it serves, each in a process of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare.confine.confinement import take

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "services.envgateway.sandbox.bare.forkserver"


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_step_fails_by_its_status_and_by_no_other_value() -> None:
    taken: list[int] = []
    take([(taken.append, (1,), True), (bool, (1,), False), (taken.append, (2,), False)])
    assert taken == [1, 2]
    libc = ctypes.CDLL(None, use_errno=True)
    with pytest.raises(OSError, match=r"chdir.*No such file or directory"):
        take([(libc.chdir, (b"/nowhere",), True), (taken.append, (3,), False)])
    assert taken == [1, 2]


def test_examples_leave_the_fork_server_as_it_was() -> None:
    state = """
def state():
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.sigpending(), signal.getitimer(signal.ITIMER_REAL)
    streams = sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.getrecursionlimit()
    return signals, streams, dict(sys.modules), os.listdir("/proc/self/fd"), os.getcwd(), gc.isenabled()
"""
    code = f"""
import gc, os, signal, sys
from {PACKAGE} import rehearsal
from {PACKAGE}.entry import Entry
from {PACKAGE}.import_paths import hold
{state}
class Unused: pass
for fd in (3, 4, 5, 6, 7):
    hold("/dev/null", fd)
before = state()
rehearsal.rehearse(Entry(Unused()))
assert state() == before, (before, state())
print(os.readlink("/proc/self/fd/5"), rehearsal.stateless.is_stateless(rehearsal._TEXT))
"""
    assert said(code) == "/dev/null True\n"


def test_objects_lie_together_behind_filled_holes() -> None:
    code = f"""
from {PACKAGE}.packing import pack
held = [bytes(size) for size in range(15, 450) for _ in range(40)]
del held[::3]
pack()
print(all(len({{id(made) >> 14 for made in [bytes(size) for _ in range(20)]}}) <= 2 for size in (50, 100, 200, 300)))
"""
    assert said(code) == "True\n"
