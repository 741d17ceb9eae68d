"""The fork server: a warm interpreter that forks one confined child per program and says how each ended.

It is handed descriptors, never contents: a program's text is read by its child, so no child finds another's
program, input or output in the memory that it inherits. Limits are the supervisor's business.

    supervisor → zygote   Start + five descriptors (program, stdin, stdout, stderr, note), or Kill
    zygote → supervisor   Ended, once per Start
"""

from __future__ import annotations

import _signal
import gc
import os
import select
import signal
import socket
import struct
import sys

from . import program
from .confine import ChildLimits, Confinement

#: kind, run, slot, uid, echo, cpu_s, memory, processes, file bytes, open files, mark
REQUEST = struct.Struct("!cQiI?dQIQIQ")
#: run, wait status, cpu_s, peak resident bytes
ENDED = struct.Struct("!QidQ")
#: first bytes of the note channel: confinement is complete, and the child's pid
READY = struct.Struct("!ci")
START, KILL, READY_TAG, FAILED_TAG = b"S", b"K", b"R", b"E"
NUM_FDS = 5
FAILED_EXIT = 120

_LIB_FD, _NOTE_FD = 3, 4
# Imported before any fork, because cheap and common. Anything else is read from disk by the child: random and
# statistics, for one, hook into every fork and would cost each program 0.2 ms.
_PRELOADED = ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
              "json", "math", "operator", "re", "string", "time", "typing")  # fmt: skip


def _library_path() -> list[str]:
    """Where the standard library is, by a descriptor when a slot user could not walk there (a root-only home)."""
    lib = os.path.dirname(os.__file__)
    path = lib
    reachable = True
    while path != "/":
        path = os.path.dirname(path)
        reachable = reachable and bool(os.stat(path).st_mode & 0o001)
    fd = os.open(lib, os.O_RDONLY | os.O_DIRECTORY)
    if fd != _LIB_FD:
        os.dup2(fd, _LIB_FD)
        os.close(fd)
    base = lib if reachable or os.getuid() else f"/proc/self/fd/{_LIB_FD}"
    return [base, f"{base}/lib-dynload"]


def _open_builtins() -> None:
    """``exit`` and ``quit``, which the site module would have added."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))


class Zygote:
    """Answers one supervisor over a seqpacket socket until that closes."""

    def __init__(self, channel: socket.socket, tier: str, slot_dirs: list[str]) -> None:
        self._channel = channel
        self._slot_dirs = slot_dirs
        self._runs: dict[int, int] = {}  # pid of a live child: its run
        self._pid = os.getpid()
        real_library = os.path.dirname(os.__file__)
        sys.path[:] = _library_path()
        for module in list(sys.modules.values()):  # packages that are loaded find their parts by the same way
            path = getattr(module, "__path__", None)
            if isinstance(path, list):
                path[:] = [part.replace(real_library, sys.path[0], 1) for part in path]
        for name in _PRELOADED:
            __import__(name)
        _open_builtins()
        program.warm_up()
        os.environ["HOME"] = os.environ["TMPDIR"] = "."  # each child's work dir
        # found once: walking all modules in a child would copy a page for nearly each
        self._own_modules = [name for name in sys.modules if name == "bare" or name.startswith("bare.")]
        self._confinement: Confinement | OSError
        try:
            self._confinement = Confinement(tier, slot_dirs, [real_library])
            self._confinement.prepare_parent()
        except OSError as error:  # told to whoever asks for a run: the probe
            self._confinement = error

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up descriptor is written
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        gc.collect()
        gc.freeze()  # fewer pages are copied when a child's collector runs
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, REQUEST.size, NUM_FDS)
        except ConnectionResetError:  # the supervisor was killed
            return False
        if not data:
            return False
        kind, run, slot, uid, echo, cpu_s, memory, processes, file_bytes, open_files, mark = REQUEST.unpack(data)
        if kind == KILL:
            for pid in [pid for pid, owner in self._runs.items() if owner == run]:
                os.kill(pid, signal.SIGKILL)
            return True
        try:
            pid = os.fork()
        except OSError as error:  # the machine is out of processes or memory: this run's misfortune only
            os.write(fds[4], FAILED_TAG + str(error).encode())
            self._channel.send(ENDED.pack(run, 0, 0.0, 0))
        else:
            if pid == 0:
                limits = ChildLimits(cpu_s, memory, processes, file_bytes, open_files, mark)
                self._become_program(fds, slot, uid, echo, limits)
            self._runs[pid] = run
        for fd in fds:
            os.close(fd)
        return True

    def _reap(self) -> None:
        while self._runs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            cpu_s = usage.ru_utime + usage.ru_stime
            self._channel.send(ENDED.pack(self._runs.pop(pid), status, cpu_s, usage.ru_maxrss * 1024))

    def _become_program(self, fds: list[int], slot: int, uid: int, echo: bool, limits: ChildLimits) -> None:
        """Never returns. Until the ready note is written, a failure is the sandbox's, not the program's."""
        exit_code = FAILED_EXIT
        try:
            signal.set_wakeup_fd(-1)
            _signal.signal(signal.SIGCHLD, 0)  # the default; without the detour through enums
            os.setsid()
            source_fd, note_fd = fds[0], fds[4]
            os.chdir(self._slot_dirs[slot] + "/work")
            os.umask(0o077)
            source = _read_all(source_fd)
            for target, fd in enumerate(fds[1:4]):
                os.dup2(fd, target)
            try:
                if isinstance(self._confinement, OSError):
                    raise self._confinement
                self._confinement.apply(slot, uid, limits, self._pid)
                os.dup2(note_fd, _NOTE_FD, inheritable=False)
            except (OSError, ValueError) as error:
                os.write(note_fd, FAILED_TAG + str(error).encode())
                return
            os.closerange(_NOTE_FD + 1, 1 << 30)
            os.write(_NOTE_FD, READY.pack(READY_TAG, os.getpid()))
            for name in self._own_modules:
                del sys.modules[name]
            program.remember_source(source)
            exit_code = program.run(source, echo, _NOTE_FD)
        finally:
            os._exit(exit_code)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def main() -> None:
    """``argv``: channel descriptor, tier, slot directories."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    Zygote(channel, sys.argv[2], sys.argv[3:]).serve()
