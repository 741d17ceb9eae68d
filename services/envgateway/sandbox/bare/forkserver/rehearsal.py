"""Runs examples in the fork server before it serves.

The interpreter adapts code and fills caches in its first executions. Done once here, each child is spared the time, and the
copies of the pages that it would write.
"""

from __future__ import annotations

import _signal
import gc
import json
import os
import sys

from .. import messages
from ..confine.confinement import Step
from ..harness import calls, program, stateless
from . import host
from .entry import ANSWER, ASK, Entry, Steps
from .import_paths import hold

_TIMES = 20  # code is adapted after eight
_TEXT = b"""
import math
def f(n, values):
    total = 0
    for i in range(n):
        total += i * 2 % 3
    return [total, *values]
print(f(3, [1, 2]), sum(map(int, input().split())))
"""
_SIGALRM = 14
_HARMLESS: list[Step] = [(bool, (), True), (int, (1,), False)]
_STEPS = Steps(_HARMLESS, _HARMLESS)


def rehearse(entry: Entry) -> None:
    """Leaves streams, arguments, modules, descriptors and the recursion limit as they are."""
    own = sys.stdin, sys.stdout, sys.stderr
    before, argv, depth = dict(sys.modules), sys.argv, sys.getrecursionlimit()
    program.warm_up()
    host.warm_up()
    gc.collect()
    gc.freeze()  # the collections of the examples look at their objects only
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_SIGALRM,))
    files = [os.memfd_create("example") for _ in range(4)]
    try:
        for _ in range(_TIMES):
            _play(entry, *files)
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        _signal.sigtimedwait((_SIGALRM,), 0)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_SIGALRM,))
        for fd in files:
            os.close(fd)
        for fd in (ASK, ANSWER):
            hold("/dev/null", fd)
        program.remember_source(b"")  # else each child would free the example's lines
        sys.stdin, sys.stdout, sys.stderr = own
        sys.argv = argv
        sys.setrecursionlimit(depth)
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.modules.update(before)


def _play(entry: Entry, text: int, given: int, asked: int, answered: int) -> None:
    """A program, then its cases, with files in the place of pipes."""
    for fd, data in ((text, _TEXT), (given, b"1 2"), (asked, calls.framed(_settings(given)))):
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(asked, ASK)
    os.dup2(answered, ANSWER)
    with open(answered, "w", closefd=False) as sys.stdout, open(given, closefd=False) as sys.stdin:
        run = messages.Start(messages.START, 0, messages.PROGRAM, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, len(_TEXT))
        entry.become_program(run, (text,), _STEPS)
        if stateless.is_stateless(_TEXT):  # another would be run in processes of its own
            entry.become_program(run._replace(mode=messages.CASES), (text,), _STEPS)


def _settings(given: int) -> bytes:
    call = {"number": 0, "entry_point": "f", "args": ["t", 2, ["l", 1]], "kwargs": ["d"], "applied": ()}
    case = {"number": 1, "input": given - host.FIRST_INPUT_FD}
    return json.dumps(
        {"cpu_s": 9.0, "memory_bytes": 1 << 40, "wall_s": 9.0, "answer_bytes": 1 << 16, "budget_s": 9.0, "apart": False,
         "cases": [{**one, "output_bytes": 1 << 16} for one in (call, case)]}
    ).encode()  # fmt: skip
