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
from typing import NamedTuple

from .. import messages
from ..confine.confinement import Confinement, Step, take
from ..harness import calls, cells, native, prelude, program, test_code
from ..messages import ANSWER_FD, ASK_FD, NAMESPACE_FD, NOTE_FD, SOURCE_FD, STDERR_FD, STDIN_FD, STDOUT_FD, Start
from . import host

# The child's own numbers; the fork server keeps them taken, so that no received descriptor has one of them.
NOTE, ASK, ANSWER = 4, 5, 6
_SIG_SETMASK = 2  # without the detour through enums
_MOST_KINDS = 64  # of runs whose steps are kept


class Steps(NamedTuple):
    """Of a child; and, taken later, of a child that runs the cases of a program itself, one after the other."""

    child: list[Step]
    only_process: list[Step]


class Entry:
    """Lists the steps of a child (``steps``), and takes them in the child (``become_program``)."""

    def __init__(self, confinement: Confinement) -> None:
        self.confinement = confinement
        self._known: dict[bytes, Steps] = {}
        self._seeding: list[Step] = (
            [(program.draw_own_random_numbers, (), False)] if "numpy.random" in sys.modules else []
        )

    def steps(self, run: Start, fds: Sequence[int], kind: bytes) -> Steps:
        """The steps of a child, in the fork server. ``fds``: descriptors by the numbers of ``messages``. They are the same
        for all runs of a ``kind``, and made once: new objects lie in many pages."""
        known = self._known.get(kind)
        if known is None:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            known = self._known[kind] = Steps(self._of_child(run, fds), self._of_only_process(run))
        return known

    def _of_child(self, run: Start, fds: Sequence[int]) -> list[Step]:
        dup2, mode = os.dup2, run.mode
        found: list[Step] = [
            (_signal.pthread_sigmask, (_SIG_SETMASK, ()), False),
            (os.setsid, (), False),
            (dup2, (fds[STDIN_FD], 0), False),
            (dup2, (fds[STDOUT_FD], 1), False),
            (dup2, (fds[STDERR_FD], 2), False),
            *self.confinement.steps(run),
            (dup2, (fds[NOTE_FD], NOTE, False), False),
        ]
        if mode in (messages.PROGRAM, messages.ECHO, messages.JUDGED):
            found.append((os.closerange, (ASK, ANSWER + 1), False))
        else:
            ask = fds[ASK_FD if mode != messages.BINARY else SOURCE_FD]
            found += [(dup2, (ask, ASK, False), False), (dup2, (fds[ANSWER_FD], ANSWER, False), False)]
        inputs = fds[NAMESPACE_FD + 1 :]  # each has a larger number than its target
        found += [(dup2, (fd, host.FIRST_INPUT_FD + place, False), False) for place, fd in enumerate(inputs)]
        found.append((os.closerange, (host.FIRST_INPUT_FD + len(inputs), 1 << 30), False))
        if mode != messages.CASES:
            found += [*self._seeding, (gc.enable, (), False)]
        found.append((os.write, (NOTE, messages.READY_NOTE), False))
        return found

    def _of_only_process(self, run: Start) -> list[Step]:
        confined = self.confinement.case_steps(run)
        closed: list[Step] = [(os.close, (NOTE,), False), (os.closerange, (host.FIRST_INPUT_FD, 1 << 30), False)]
        return [*closed, *confined, (gc.enable, (), False)]

    def become_program(self, run: Start, fds: Sequence[int], steps: Steps) -> int:
        """In the child: the program's exit code. Until the ready note is written, a failure is the sandbox's."""
        try:
            source = os.pread(fds[SOURCE_FD], run.source_bytes if run.mode != messages.BINARY else 0, 0)
            take(steps.child)
        except (OSError, ValueError) as error:
            os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
            return messages.FAILED_EXIT
        return self._run(run, source, steps)

    def _run(self, run: Start, source: bytes, steps: Steps) -> int:
        mode = run.mode
        if mode == messages.COMPILE:
            return native.compile_program(source, ANSWER)
        if mode == messages.BINARY:
            return native.become(ASK)
        program.remember_source(source)
        if mode in (messages.PROGRAM, messages.ECHO, messages.JUDGED):
            supply = prelude.prepare if mode == messages.JUDGED else None
            return program.run(source, mode == messages.ECHO, NOTE, supply=supply)
        if mode == messages.CELLS:
            return cells.serve(NOTE, ASK, ANSWER)
        if mode == messages.CASES:
            served = host.Host(self.confinement, run, source, steps.only_process)
            for case in served.cases():  # done here, where the stack is as deep as in a run of its own
                if case.call is None:
                    case.exit_code = program.run(source, False, case.note_fd, case.code, case.supply)
                else:
                    case.exit_code = calls.run_one(source, case.call, case.note_fd, case.tell, case.code, case.supply)
            return served.exit_code
        payload = json.loads(os.pread(ASK, os.fstat(ASK).st_size, 0))
        os.close(ASK)
        run_one = test_code.run if mode == messages.TESTS else calls.run_one
        return run_one(source, payload, NOTE, lambda frame: calls.write_bytes(ANSWER, frame))
