"""Runs a program's cases in one confined run.

    fork server ──fork── host ──fork── case 0
                          │  ──fork── case 1, when case 0 has left no trace
                          └ compiles the program, runs no line of it

    fork server ──fork── case 0, case 1, ..., one after the other: of a program that keeps no state (``stateless``)

Confinement, the slot's directory and the compiler's work are paid once for a program, and a case finds the same as in a
run of its own: an unused interpreter and work dir, and no other process.

Invariant: a case has a record only if it ended within its limits, or was stopped by the host for time or output, and
left no trace: no process (the host adopts them all), no file in the slot's directory. At any other case the host ends
without a record; that case, and those behind, run alone. So no case sees another's effects on the shared place, and no
such effect decides a verdict.

Where slots have users of their own, the host's real and saved users belong to no slot: its cases can neither signal the
host nor set its limits, and no process can trace the host.

Frames in:  settings (JSON: cpu_s, memory_bytes, wall_s, answer_bytes, budget_s, apart: whether to skip the check of the
            text, cases: each with ``number``, ``output_bytes``, and ``input``, the index of its stdin's descriptor, or
            the payload of ``calls.run_one``), then {"cases": how many to run}; an empty one at the end
Frames out: records of ``endings``, several in one frame; then an empty one. Of a stateless program all come at once.
"""

from __future__ import annotations

import _signal
import _socket
import ctypes
import gc
import io
import json
import os
import re
import resource
import select
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import endings, messages
from ..confine.confinement import Confinement, Step, take
from ..confine.quota import Room
from ..endings import CaseRecord
from ..harness import calls, prelude, program, stateless
from ..pipes import CappedPipe
from ..statuses import STOOD_STILL_S

FIRST_INPUT_FD = 8  # below are the descriptors that every child has by number
_NOTE, _ASK, _ANSWER = 4, 5, 6
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_LOOK_S, _LOOK_EVERY_S = 0.002, 0.010
_SHORT_S = 0.1  # of a case that is run in one process after others: a longer case gains too little
_TOLD_EVERY_S = 0.005
_NOBODY = -1  # a note would end the case, and is not needed for that
_TOLD_AT_ONCE = 1 << 16  # bytes of records that are not kept until the last case is done
_SLOW_CASE_S = 0.020  # after which neither
_SIGCHLD, _SIGKILL = 17, 9


class _Stream(CappedPipe):
    """One output pipe of a case."""

    def __init__(self, cap: int) -> None:
        read_fd, self.write_fd = os.pipe()
        os.set_blocking(read_fd, False)  # of this end only
        super().__init__(read_fd, cap)


class _Place:
    """The slot's directories as they were before the first case."""

    def __init__(self, slot_dir: str | None, own_disk: bool) -> None:
        """``slot_dir``: None where the work dir is the only writable place; else the directory around the work dir is
        checked, too. ``own_disk``: the disk is the run's alone, and its inode numbers count up."""
        self._paths = [".", "."] if slot_dir is None else [slot_dir, f"{slot_dir}/work"]
        self._expected = self._state()
        self._files = self._num_files() if own_disk else None
        self._cores = os.sched_getaffinity(0)

    def is_untouched(self) -> bool:
        """Whether the slot's directories and this process's CPU affinity are as before the first case."""
        try:
            if self._state() != self._expected or os.sched_getaffinity(0) != self._cores:
                return False
            if self._files is not None:  # also a file that has no name, or had one for a while
                self._files += 1
                return self._num_files() == self._files
            return True
        except OSError:  # renamed, removed or closed
            return False

    def _state(self) -> list[Any]:
        found: list[Any] = [os.listdir(path) for path in self._paths]
        for path in self._paths:
            state = os.stat(path)
            found.append((state.st_mode, state.st_uid, state.st_ino, state.st_mtime_ns, state.st_ctime_ns))
            found.append(os.listxattr(path))
        return found

    def _num_files(self) -> int:
        """The number of files that were ever made on the run's disk, the one of this look included."""
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY)
        try:
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)


class _Watched:
    """A case in a process of its own, until its end or a stop."""

    def __init__(self, streams: list[_Stream], wall_s: float) -> None:
        """``streams``: stdout, stderr and answer."""
        self.stopped = endings.NOT_STOPPED
        self._pid = 0
        self._wait_status = 0
        self._cpu_s = 0.0
        self._peak_bytes = 0
        self._streams = streams
        self._limit_s = wall_s
        self._notes, self._note = _socket.socketpair()
        self._said = b""
        self._began = self._deadline = 0.0
        self._wall_s = 0.0
        self._was_alone = False

    @property
    def note_fd(self) -> int:
        """The forked process's end of the channel for its notes."""
        return self._note.fileno()

    def fork(self) -> int:
        self._began = time.monotonic()
        self._deadline = self._began + self._limit_s
        self._pid = os.fork()
        return self._pid

    def wait(self) -> None:
        """Wait for the case's end: its output is complete then, unless the case has left processes."""
        self._note.close()
        for stream in self._streams:
            os.close(stream.write_fd)
        self._watch()
        self._wall_s = time.monotonic() - self._began
        self._was_alone = self._is_alone()  # before the output is read: remaining processes may be writing
        for stream in self._streams:
            stream.drain()
            stream.close()
        if select.select([self._notes], [], [], 0)[0]:
            self._said = self._notes.recv(64)
        self._notes.close()

    def _watch(self) -> None:
        """Sleep until a child has ended; check the output of a long case."""
        look_s = _FIRST_LOOK_S
        while not self._reaped(os.WNOHANG):
            now = time.monotonic()
            left_s = self._deadline - now
            if left_s <= 0:
                self._stop(endings.OUT_OF_TIME)
                return
            wait_s = min(look_s, left_s)
            has_ended = _signal.sigtimedwait((_SIGCHLD,), wait_s) is not None
            self._leave_out(time.monotonic() - now - wait_s)
            if not has_ended:
                look_s = _LOOK_EVERY_S
                for stream in self._streams:
                    stream.drain()
                if any(stream.truncated for stream in self._streams):
                    self._stop(endings.TOO_MUCH_OUTPUT)
                    return

    def _leave_out(self, late_s: float) -> None:
        """The time in which the machine did not go on."""
        if late_s > STOOD_STILL_S:
            self._began += late_s
            self._deadline += late_s

    def _stop(self, why: int) -> None:
        self.stopped = why
        os.kill(self._pid, _SIGKILL)
        self._reaped(0)

    def _reaped(self, options: int) -> bool:
        pid, self._wait_status, usage = os.wait4(self._pid, options)
        if pid:
            self._cpu_s += usage.ru_utime + usage.ru_stime
            self._peak_bytes = usage.ru_maxrss * 1024
        return pid != 0

    def _is_alone(self) -> bool:
        """Whether the case has left no process; its dead processes are charged to the case."""
        try:
            while True:
                pid, _, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return False
                self._cpu_s += usage.ru_utime + usage.ru_stime
        except ChildProcessError:
            return True

    def can_be_recorded(self, cpu_s: float, memory_bytes: int) -> bool:
        """Whether a record is possible: the case has begun, no limit of the supervisor affects its end, and no process
        remains."""
        killed = self.stopped == endings.NOT_STOPPED and self._wait_status & 0x7F == _SIGKILL
        within = self._cpu_s <= cpu_s and self._peak_bytes <= memory_bytes
        return self._said.startswith(messages.READY_NOTE) and self._was_alone and within and not killed

    @property
    def has_failed(self) -> bool:
        """Whether the case ended by itself, and not with an exit code of 0."""
        return self.stopped == endings.NOT_STOPPED and self._wait_status != 0

    def record(self, number: int) -> CaseRecord:
        stdout, stderr, answer = self._streams
        truncated = stdout.truncated or stderr.truncated
        stopped = self.stopped
        if stopped != endings.OUT_OF_TIME and answer.truncated:
            stopped = endings.ANSWER_TOO_LARGE
        elif stopped == endings.NOT_STOPPED and truncated:
            stopped = endings.TOO_MUCH_OUTPUT
        return CaseRecord(number, stopped, truncated, self._wait_status, self._wall_s, self._cpu_s, self._peak_bytes,
                          bytes(stdout.data), bytes(stderr.data), bytes(answer.data), self._said[1:])  # fmt: skip


@dataclass(slots=True)
class Case:
    """Task of a case's process: ``call`` a function, or if None run a program that reads its stdin."""

    call: dict[str, Any] | None
    code: Any
    note_fd: int
    tell: Callable[[bytes], None]  # gets the value of a call
    supply: program.Supply = prelude.prepare  # puts names into the program's namespace
    exit_code: int = messages.FAILED_EXIT  # set by the executor of the case


class Host:
    """Serves one program's cases."""

    def __init__(self, confinement: Confinement, run: messages.Start, source: bytes, steps: list[Step]) -> None:
        """``steps``: of a process that runs all cases itself, after reading their inputs."""
        self._confinement = confinement
        self._steps = steps
        self._run = run
        self._source = source
        self._pid = os.getpid()
        self._settings: dict[str, Any] = {}
        self._code: Any = None
        self._warned = ""
        self._spent_s = 0.0
        self._unsent = bytearray()
        self._room: Room | None = None  # of a disk that other processes use, too
        self.exit_code = 0  # of the host

    def cases(self) -> Iterator[Case]:
        """Serve the gateway. The caller executes the yielded cases, at the stack depth of a run of its own: all cases
        of a stateless program, or one case, in a process forked for that case."""
        self._settings = json.loads(calls.read_frame(_ASK) or b"{}")
        if exit_code := program.guarded(self._compile, _NOTE):
            program.flush([sys.stderr])
            self.exit_code = exit_code
        elif not (self._settings["apart"] or self._warned) and stateless.is_stateless(self._source):
            yield from self._one_after_the_other()
        else:
            yield from self._each_apart()

    def _compile(self) -> None:
        """Compile the program. Each case prints the compiler's warnings, as a run of its own would."""
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            self._code = program.compiled(self._source, _NOTE)
            self._warned = sys.stderr.getvalue()
        finally:
            sys.stderr = stderr

    def _send_records(self) -> None:
        if self._unsent:
            calls.write_bytes(_ANSWER, calls.framed(bytes(self._unsent)))
            self._unsent.clear()

    # -- each in a process of its own -------------------------------------------------------------------------------

    def _each_apart(self) -> Iterator[Case]:
        os.write(_NOTE, messages.HOST_NOTE)
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            self.exit_code = messages.FAILED_EXIT
            return
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_SIGCHLD,))
        self._place = _Place(self._confinement.slot_dir(self._run), self._confinement.has_own_disk)
        if not self._confinement.has_own_disk:
            self._room = Room(".", self._run.disk_bytes, self._run.num_files)
        left = deque(self._settings["cases"])
        while left and (frame := calls.read_frame(_ASK)):
            for _ in range(min(json.loads(frame)["cases"], len(left))):
                if self._spent_s >= self._settings["budget_s"]:
                    break
                case = left.popleft()
                started = self._fork_case(case)
                if isinstance(started, Case):
                    yield started
                    os._exit(started.exit_code)
                if not self._is_recorded(case, started):
                    self._send_records()
                    return
            self._send_records()
            calls.write_frame(_ANSWER, "")

    def _fork_case(self, case: dict[str, Any]) -> Case | _Watched:
        """Fork a case. Returns the watched case in the host, and the case to execute in the forked process."""
        streams = [_Stream(cap) for cap in (case["output_bytes"], case["output_bytes"], self._settings["answer_bytes"])]
        watched = _Watched(streams, self._settings["wall_s"])
        if watched.fork() == 0:
            is_call = "args" in case
            stdin = os.open("/dev/null", os.O_RDONLY) if is_call else FIRST_INPUT_FD + case["input"]
            self._enter([stdin, *(stream.write_fd for stream in streams)], watched.note_fd, is_call)
            sys.stderr.write(self._warned)
            return self._case(case, _NOTE, lambda frame: calls.write_bytes(_ANSWER, frame))
        watched.wait()
        return watched

    def _case(self, case: dict[str, Any], note_fd: int, *how: Any) -> Case:
        return Case(case if "args" in case else None, self._code, note_fd, *how)

    def _is_recorded(self, case: dict[str, Any], watched: _Watched) -> bool:
        """Record a case. Returns False for a case that must run alone."""
        settings = self._settings
        if not (watched.can_be_recorded(settings["cpu_s"], settings["memory_bytes"]) and self._place.is_untouched()):
            return False
        if watched.has_failed and self._room is not None and self._room.was_short():  # perhaps the disk's fault
            return False
        record = watched.record(case["number"])
        self._spent_s += record.wall_s
        self._unsent += record.packed()
        if len(self._unsent) > _TOLD_AT_ONCE or record.wall_s > _SLOW_CASE_S:
            self._send_records()
        return True

    def _enter(self, fds: list[int], note_fd: int, answers: bool) -> None:
        """In a forked process: take a program's identity. ``fds``: stdin, stdout, stderr, answer."""
        failed = True
        try:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_SIGCHLD,))
            os.setsid()
            for target in (0, 1, 2):
                os.dup2(fds[target], target)
            os.dup2(note_fd, _NOTE, inheritable=False)
            os.close(_ASK)
            if answers:
                os.dup2(fds[3], _ANSWER, inheritable=False)
            else:
                os.close(_ANSWER)
            os.closerange(FIRST_INPUT_FD, 1 << 30)
            take(self._confinement.case_steps(self._run, self._pid))
            program.draw_own_random_numbers()
            os.write(_NOTE, messages.READY_NOTE)
            gc.enable()
            failed = False
        finally:
            if failed:
                os._exit(messages.FAILED_EXIT)

    # -- one after the other in one process --------------------------------------------------------------------------

    def _one_after_the_other(self) -> Iterator[Case]:
        """Ends at the first case without a clean end: a failure or a timeout is judged in a run of its own."""
        cases = self._settings["cases"]
        inputs = [self._input(case) for case in cases]
        take(self._steps)
        usual_depth = sys.getrecursionlimit()
        own = sys.stdin, sys.stdout, sys.stderr
        told_s = time.monotonic()
        self.exit_code = messages.UNFINISHED_EXIT
        for case, given in zip(cases, inputs, strict=True):
            if self._spent_s >= self._settings["budget_s"]:
                break
            if time.monotonic() - told_s > _TOLD_EVERY_S or len(self._unsent) > _TOLD_AT_ONCE:
                self._send_records()
                told_s = time.monotonic()
            out, err, answers = self._own_streams(given, own)
            sys.setrecursionlimit(usual_depth)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            _signal.setitimer(_signal.ITIMER_REAL, _SHORT_S)  # its signal ends the process
            done = self._case(case, _NOBODY, answers.append, stateless.supply)
            yield done
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            times = time.monotonic() - began_s, time.process_time() - began_cpu_s
            texts = out.getvalue(), err.getvalue(), b"".join(answers)
            if done.exit_code or not self._is_within(case, times, texts):
                self._send_records()
                return
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._spent_s += times[0]
            self._unsent += CaseRecord(
                case["number"], endings.NOT_STOPPED, False, 0, *times, peak_bytes, *texts, b""
            ).packed()
            _forget()
        self._send_records()
        calls.write_frame(_ANSWER, "")
        self.exit_code = 0

    @staticmethod
    def _own_streams(given: bytes, usual: tuple[Any, Any, Any]) -> tuple[io.BytesIO, io.BytesIO, list[bytes]]:
        """Replace stdout, stderr and the answer for one case; ``given`` is its stdin, ``usual`` are the streams of a
        process."""
        out, err, answers = io.BytesIO(), io.BytesIO(), []  # type: ignore[var-annotated]
        stdin, stdout, stderr = usual
        sys.stdin = io.TextIOWrapper(io.BytesIO(given), stdin.encoding, stdin.errors)
        sys.stdout = io.TextIOWrapper(out, stdout.encoding, stdout.errors)
        sys.stderr = io.TextIOWrapper(err, stderr.encoding, stderr.errors, line_buffering=True)
        return out, err, answers

    def _is_within(self, case: dict[str, Any], times: tuple[float, float], texts: tuple[bytes, ...]) -> bool:
        limits, (wall_s, cpu_s), (out, err, answer) = self._settings, times, texts
        fits = max(len(out), len(err)) <= case["output_bytes"] and len(answer) <= limits["answer_bytes"]
        return bool(fits and wall_s <= limits["wall_s"] and cpu_s <= limits["cpu_s"])

    @staticmethod
    def _input(case: dict[str, Any]) -> bytes:
        if "args" in case:
            return b""
        fd = FIRST_INPUT_FD + case["input"]
        return os.pread(fd, os.fstat(fd).st_size, 0)


def _forget() -> None:
    """Free an execution's state that no later execution can name: memory, and compiled patterns, whose warnings come once."""
    for name in ("__main__", calls.MODULE):
        sys.modules.pop(name, None)
    re.purge()
    for forget in typing._cleanups:  # type: ignore[attr-defined]  # List[7] and List[7.0] are one entry, the first one's
        forget()
    gc.collect()


def warm_up() -> None:
    """Do once, before any fork, the set-up that the first check of a text and the first stream in memory cause."""
    stateless.is_stateless(program.EXAMPLE)
    io.TextIOWrapper(io.BytesIO(b"1"), "utf-8").read()
