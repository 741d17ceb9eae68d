"""The supervisor: holds every limit, decides every verdict, and leaves every slot empty.

One thread, one epoll loop, started before the gateway has any thread. It is the child subreaper, so whatever a
program leaves running becomes its child and is found. It answers one gateway and ends, with all runs, when that goes.

Invariant: an answer is sent only when the run's slot has no process and an empty work dir.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import procfs, wire
from .run import Limits, Run
from .slots import Slot
from .zygote import ENDED, KILL, REQUEST, START

_PR_SET_CHILD_SUBREAPER = 36
_CLEANING_LOOK_S = 0.002
_COUNT_USER_EVERY_S = 1.0
_MAX_ZYGOTE_DEATHS = 5  # in a row, without one program ended
_LOWEST_CHANNEL_FD = 10  # below are the descriptors that a zygote gives fixed numbers


class ZygoteDied(Exception):
    """The fork server has gone; its runs have no verdict."""


class Supervisor:
    """Runs programs for the probe (``run_alone``) and then for the gateway (``serve``)."""

    def __init__(self, gateway: socket.socket, tier: str, slots: list[Slot]) -> None:
        self._gateway = gateway
        self._tier = tier
        self._slots = slots
        self._free = list(slots)
        self._runs: dict[int, Run] = {}
        self._cleaning: dict[int, Run] = {}
        self._outgoing = bytearray()
        self._frames = wire.FrameReader()
        self._pid = os.getpid()
        self._zygote_deaths = 0
        self._user_tasks = 0
        self._count_again = 0.0
        self._epoll = select.epoll()
        self._epoll.register(gateway, select.EPOLLIN)
        self._devnull = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._start_zygote()

    # -- the fork server ----------------------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD, _LOWEST_CHANNEL_FD)
        theirs.close()
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        boot = f"import sys; sys.path.append({package!r}); from bare.zygote import main; main()"
        arguments = [sys.executable, *BARE_FLAGS, "-c", boot, str(fd), self._tier, *(s.directory for s in self._slots)]
        self._zygote_pid = os.posix_spawn(sys.executable, arguments, dict(os.environ))
        os.close(fd)
        self._zygote = ours
        self._epoll.register(ours, select.EPOLLIN)

    def _zygote_died(self) -> None:
        """Its children die with it (parent-death signal); their runs are the machine's failure, not the program's."""
        self._epoll.unregister(self._zygote)
        self._zygote.close()
        self._zygote_deaths += 1
        if self._zygote_deaths > _MAX_ZYGOTE_DEATHS:
            raise ZygoteDied(f"the fork server died {self._zygote_deaths} times in a row")
        for run in list(self._runs.values()):
            run.stop_status = "INFRA_ERROR"
            run.detail = "the fork server died"
            self._begin_cleaning(run, time.monotonic())
        self._start_zygote()

    # -- loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the gateway closes its end."""
        while self._turn():
            pass
        for slot in self._slots:
            slot.sweep()

    def run_alone(self, source: bytes, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        """One run without a gateway: the start-up probe."""
        self._epoll.unregister(self._gateway)
        self._start(0, limits, source, b"", False)
        while not self._outgoing:
            self._turn()
        frame = next(wire.FrameReader().feed(bytes(self._outgoing)))
        self._outgoing.clear()
        self._epoll.register(self._gateway, select.EPOLLIN)
        return frame

    def close(self) -> None:
        self._epoll.unregister(self._zygote)
        self._zygote.close()
        os.waitpid(self._zygote_pid, 0)

    def _turn(self) -> bool:
        now = time.monotonic()
        wait = -1.0
        if self._cleaning:
            wait = _CLEANING_LOOK_S
        elif self._runs:
            wait = max(0.0, min(run.next_look for run in self._runs.values()) - now)
        for fd, event in self._epoll.poll(wait):
            if fd == self._zygote.fileno():
                self._receive_ended()
            elif fd == self._gateway.fileno():
                if event & select.EPOLLOUT:
                    self._flush()
                if event & ~select.EPOLLOUT and not self._receive_requests():
                    return False
        now = time.monotonic()
        due = [run for run in self._runs.values() if run.next_look <= now]
        if due:
            strangers = self._strangers()
            for run in due:
                self._look(run, now, strangers)
        for run in list(self._cleaning.values()):
            self._clean(run, now)
        return True

    def _look(self, run: Run, now: float, strangers: list[int]) -> None:
        strays = run.slot.strays(strangers) if strangers else []
        status = run.look(now, strays)
        if status is not None:
            self._stop(run, status)

    def _stop(self, run: Run, status: str) -> None:
        if run.stop_status is None:
            run.stop_status = status
        # asked of the zygote, which alone knows that the pid is not yet somebody else's
        try:
            self._zygote.send(REQUEST.pack(KILL, run.id, 0, 0, False, 0.0, 0, 0, 0, 0, 0))
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end of file is the next event
        run.next_look = time.monotonic() + 0.05

    # -- the gateway's side -------------------------------------------------------------------------------------

    def _receive_requests(self) -> bool:
        try:
            data = self._gateway.recv(1 << 20)
        except ConnectionResetError:
            return False
        if not data:
            return False
        for head, blobs in self._frames.feed(data):
            if head["kind"] == "run":
                self._start(head["id"], Limits(**head["limits"]), blobs[0], blobs[1], head["echo"])
            elif head["kind"] == "cancel" and head["id"] in self._runs:
                self._stop(self._runs[head["id"]], "CANCELLED")
        return True

    def _send(self, head: dict[str, Any], blobs: list[bytes]) -> None:
        self._outgoing += wire.encode(head, blobs)
        if head["id"]:
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self._gateway.send(self._outgoing, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):  # the gateway has gone: the next read says so
            sent = len(self._outgoing)
        del self._outgoing[:sent]
        self._epoll.modify(self._gateway, select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    # -- runs ---------------------------------------------------------------------------------------------------

    def _start(self, run_id: int, limits: Limits, source: bytes, stdin: bytes, echo: bool) -> None:
        slot = self._free.pop()
        source_fd = _sealed(source)
        stdin_fd = _sealed(stdin) if stdin else self._devnull
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        for read_end, _ in pipes:
            os.set_blocking(read_end, False)
        out, err, note = (read_end for read_end, _ in pipes)
        run = Run(run_id, slot, limits, (out, err, note), time.monotonic())
        self._runs[run_id] = run
        request = REQUEST.pack(
            START, run_id, slot.index, slot.uid, echo, limits.cpu_s, limits.memory_bytes,
            limits.processes + self._others_of_user(), limits.file_bytes, limits.open_files, slot.mark,
        )  # fmt: skip
        write_ends = [write_end for _, write_end in pipes]
        try:
            socket.send_fds(self._zygote, [request], [source_fd, stdin_fd, *write_ends])
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end of file is the next event, and marks this run with the others
        for fd in [source_fd, *write_ends, *([stdin_fd] if stdin else [])]:
            os.close(fd)

    def _others_of_user(self) -> int:
        """Processes that the kernel counts with a program's own: at tier 0 those of the gateway's user.

        Without a limit in the kernel a fork bomb doubles in less time than passes between two looks.
        """
        if self._tier != "0":
            return 0
        now = time.monotonic()
        if now >= self._count_again:
            self._user_tasks = procfs.num_tasks_of(os.getuid())
            self._count_again = now + _COUNT_USER_EVERY_S
        return self._user_tasks

    def _receive_ended(self) -> None:
        try:
            data = self._zygote.recv(ENDED.size)
        except ConnectionResetError:
            data = b""
        if not data:
            self._zygote_died()
            return
        self._zygote_deaths = 0
        run_id, wait_status, cpu_s, peak = ENDED.unpack(data)
        run = self._runs.get(run_id)
        if run is None:
            return
        run.wait_status = wait_status
        run.cpu_s = max(run.cpu_s, cpu_s + run.strays_cpu_s)
        run.peak_memory_bytes = max(run.peak_memory_bytes, peak)
        now = time.monotonic()
        self._begin_cleaning(run, now)
        self._clean(run, now)

    def _begin_cleaning(self, run: Run, now: float) -> None:
        del self._runs[run.id]
        self._cleaning[run.id] = run
        run.ended = now

    def _clean(self, run: Run, now: float) -> None:
        """Answer if the slot is empty; else kill what is there and look again soon."""
        self._reap()
        strangers = self._strangers()
        strays = run.slot.strays(strangers) if strangers else []
        if strays:
            used = procfs.usage(procfs.descendants(strays))
            run.cpu_s = max(run.cpu_s, used.cpu_s + run.strays_cpu_s)
            run.slot.kill(strays)
            return
        del self._cleaning[run.id]
        run.close()
        run.slot.wipe()
        self._free.append(run.slot)
        self._send(*run.result(self._tier))

    def _strangers(self) -> list[int]:
        """Children of ours that are not the zygote: what programs left behind."""
        return [pid for pid in procfs.children(self._pid) if pid != self._zygote_pid]

    def _reap(self) -> None:
        """Collect dead strays, and charge them to the run whose user they ran as."""
        while True:
            try:
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if state is None:
                return
            _, _, usage = os.wait4(state.si_pid, 0)
            for run in [*self._runs.values(), *self._cleaning.values()]:
                if run.slot.own_user and run.slot.uid == state.si_uid:
                    run.strays_cpu_s += usage.ru_utime + usage.ru_stime


def _sealed(data: bytes) -> int:
    """A read-only file in memory, at its start: the reader may take it in any way, and nobody has to feed it."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    return fd


_F_ADD_SEALS, _SEAL_ALL = 1033, 0xF  # seal, shrink, grow, write
BARE_FLAGS = ("-I", "-S", "-X", "utf8")


def become_supervisor() -> None:
    """Process attributes: adopt orphans, survive a terminal's Ctrl-C until the gateway ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
