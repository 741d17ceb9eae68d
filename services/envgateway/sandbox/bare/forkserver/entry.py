"""A child's way from the fork to the program.

The calls of the way are listed before the fork. In the child most code would run for the first time, in memory that is
shared with the fork server: a line of Python costs several copied pages there.
"""

from __future__ import annotations

import _signal
import gc
import json
import os
import sys
from collections.abc import Sequence

from .. import messages
from ..confine.confinement import Confinement, Step, take
from ..harness import calls, cells, native, prelude, program, test_code
from ..messages import ANSWER_FD, ASK_FD, NOTE_FD, SOURCE_FD, STDERR_FD, STDIN_FD, STDOUT_FD, Start

# The child's own numbers; the fork server keeps them taken, so that no received descriptor has one of them.
NOTE, ASK, ANSWER, FIRST_FREE = 4, 5, 6, 8
_SIG_SETMASK = 2  # without the detour through enums
_WITHOUT_ANSWER = (messages.PROGRAM, messages.ECHO, messages.JUDGED)


def steps_of(confinement: Confinement, run: Start, fds: Sequence[int]) -> list[Step]:
    """The steps of a child, in the fork server. ``fds``: descriptors by the numbers of ``messages``."""
    dup2 = os.dup2
    found: list[Step] = [
        (_signal.pthread_sigmask, (_SIG_SETMASK, ()), False),
        (os.setsid, (), False),
        (dup2, (fds[STDIN_FD], 0), False),
        (dup2, (fds[STDOUT_FD], 1), False),
        (dup2, (fds[STDERR_FD], 2), False),
        *confinement.steps(run),
        (dup2, (fds[NOTE_FD], NOTE, False), False),
    ]
    if run.mode in _WITHOUT_ANSWER:
        found.append((os.closerange, (ASK, ANSWER + 1), False))
    else:
        ask = fds[ASK_FD if run.mode != messages.BINARY else SOURCE_FD]
        found += [(dup2, (ask, ASK, False), False), (dup2, (fds[ANSWER_FD], ANSWER, False), False)]
    found.append((os.closerange, (FIRST_FREE, 1 << 30), False))
    if "numpy.random" in sys.modules:
        found.append((program.draw_own_random_numbers, (), False))
    return [*found, (gc.enable, (), False), (os.write, (NOTE, messages.READY_NOTE), False)]


def become_program(run: Start, fds: Sequence[int], steps: Sequence[Step]) -> int:
    """In the child: the program's exit code. Until the ready note is written, a failure is the sandbox's."""
    mode = run.mode
    try:
        source = os.pread(fds[SOURCE_FD], run.source_bytes if mode != messages.BINARY else 0, 0)
        take(steps)
    except (OSError, ValueError) as error:
        os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
        return messages.FAILED_EXIT
    if mode == messages.COMPILE:
        return native.compile_program(source, ANSWER)
    if mode == messages.BINARY:
        return native.become(ASK)
    program.remember_source(source)
    if mode in _WITHOUT_ANSWER:
        supply = prelude.prepare if mode == messages.JUDGED else None
        return program.run(source, mode == messages.ECHO, NOTE, supply)
    if mode == messages.CELLS:
        return cells.serve(NOTE, ASK, ANSWER)
    payload = json.loads(os.pread(ASK, os.fstat(ASK).st_size, 0))
    os.close(ASK)
    run_one = test_code.run if mode == messages.TESTS else calls.run_one
    return run_one(source, payload, NOTE, lambda frame: calls.write_bytes(ANSWER, frame))
