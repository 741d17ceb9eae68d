"""Fork servers: warm interpreters that fork one confined child per run and report the end of each.

A fork server receives descriptors, never contents: a child reads its program's text itself, so no child finds
another's program, input or output in inherited memory. The supervisor keeps the limits.

A profile names the preloaded modules: ``plain`` the common part of the standard library, ``scientific`` numpy and sympy
on top, ``native`` none: its children may execute, and become the compiler or its output. ``shell`` is ``plain`` with
children that may execute the machine's programs; only tier 2 has it.

    ForkServers       in the supervisor: one fork server for each profile; a dead one is replaced
    ForkServerChild   the fork server's own process
"""

from __future__ import annotations

import _signal
import _socket
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from . import harness, native, procfs, wire
from .confinement import Confinement, Step, take
from .wire import (
    ANSWER_FD,
    ASK_FD,
    BOUND_AT_START,
    NAMESPACE_FD,
    NOTE_FD,
    PLAIN,
    SHELL,
    SOURCE_FD,
    STDERR_FD,
    STDIN_FD,
    STDOUT_FD,
    Start,
)

# --- In the supervisor.


BARE_FLAGS = ("-I", "-S", "-X", "utf8")
_LOWEST_CHANNEL_FD = 10  # below are the descriptors that a fork server gives fixed numbers
_MAX_DEATHS = 5  # in a row, without one program ended
_END_S, _END_LOOK_S = 10.0, 0.001  # of a fork server that is dying


class ForkServerDiedError(Exception):
    """The plain fork server cannot be kept alive: there is no sandbox."""


class ForkServer:
    """One fork server process, and its unfinished runs."""

    def __init__(self, profile: str, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD, _LOWEST_CHANNEL_FD)
        theirs.close()
        package = os.path.abspath(__file__).rsplit(os.sep, 2)[0]  # parent of the package ``bare``
        boot = f"import sys; sys.path.append({package!r}); from bare.fork_server import main; main()"
        told = json.dumps({**settings, "profile": profile})
        arguments = [sys.executable, *BARE_FLAGS, "-c", boot, str(fd), told]
        # libraries are bound once at the start, not by each child; the fork server removes the variable for programs
        self.pid = os.posix_spawn(sys.executable, arguments, {**os.environ, BOUND_AT_START: "1"})
        os.close(fd)
        self.profile = profile
        self.channel = ours
        self.runs: set[int] = set()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.channel, [message], fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end of file is the next event, and marks its runs


class ForkServers:
    """The fork server of each profile, registered with the supervisor's epoll."""

    def __init__(self, epoll: select.epoll, settings: dict[str, Any]) -> None:
        self._epoll = epoll
        self._settings = settings
        self._of_profile: dict[str, ForkServer] = {}
        self._deaths: dict[str, int] = {}

    def get(self, profile: str) -> ForkServer:
        """The profile's, started when there is none; the plain one where the profile's cannot live."""
        if self._deaths.get(profile, 0) > _MAX_DEATHS:
            profile = PLAIN
        server = self._of_profile.get(profile)
        if server is None:
            server = self._of_profile[profile] = ForkServer(profile, self._settings)
            self._epoll.register(server.channel, select.EPOLLIN)
        return server

    def of_fd(self, fd: int) -> ForkServer | None:
        return next((server for server in self._of_profile.values() if server.channel.fileno() == fd), None)

    @property
    def pids(self) -> set[int]:
        return {server.pid for server in self._of_profile.values()}

    def receive(self, server: ForkServer) -> tuple[Any, ...] | None:
        """The next message; None when the fork server has died."""
        try:
            data = server.channel.recv(wire.ENDED_STRUCT.size)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        message = wire.ENDED_STRUCT.unpack(data)
        if message[0] == wire.ENDED:
            self._deaths[server.profile] = 0
            server.runs.discard(message[1])
        return message

    def died(self, server: ForkServer) -> set[int]:
        """Remove a dead fork server; returns its runs. The next run of its profile starts another one.

        Raises:
            ForkServerDiedError: the plain fork server has died too often in a row.
        """
        self._forget(server)
        _await_end(server.pid)
        self._deaths[server.profile] = self._deaths.get(server.profile, 0) + 1
        if server.profile == PLAIN and self._deaths[PLAIN] > _MAX_DEATHS:
            raise ForkServerDiedError(f"the fork server died {self._deaths[PLAIN]} times in a row")
        return server.runs

    def close(self) -> None:
        for server in list(self._of_profile.values()):
            self._forget(server)
            try:
                os.waitpid(server.pid, 0)
            except ChildProcessError:  # already reaped with the strays
                pass

    def _forget(self, server: ForkServer) -> None:
        self._epoll.unregister(server.channel)
        del self._of_profile[server.profile]
        server.channel.close()


def _await_end(pid: int) -> None:
    """Wait until a fork server whose channel has closed is dead. The kernel closes the channel before it kills the programs
    of the fork server and gives them to their new parent; until then no slot shows that it still has a process.

    Raises:
        ForkServerDiedError: the fork server does not end. A new supervisor ends what is left.
    """
    latest = time.monotonic() + _END_S
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > latest:
                raise ForkServerDiedError(f"the fork server {pid} has not ended {_END_S:g} s after SIGKILL")
            os.kill(pid, signal.SIGKILL)
            time.sleep(_END_LOOK_S)
    except ChildProcessError:  # already reaped with the strays
        pass


# --- A child's way from the fork to the program. Its calls are listed before the fork: in the child most code would run for
# the first time, in memory that is shared with the fork server, and a line of Python costs several copied pages there.


# The child's own numbers; the fork server keeps them taken, so that no received descriptor has one of them.
NOTE, ASK, ANSWER, FIRST_FREE = 4, 5, 6, 8
_SIG_SETMASK = 2  # without the detour through enums
_WITHOUT_ANSWER = (wire.PROGRAM, wire.ECHO, wire.JUDGED)


def steps_of(confinement: Confinement, run: Start, fds: Sequence[int]) -> list[Step]:
    """The steps of a child, in the fork server. ``fds``: descriptors by the numbers of ``wire``."""
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
        ask = fds[ASK_FD if run.mode != wire.BINARY else SOURCE_FD]
        found += [(dup2, (ask, ASK, False), False), (dup2, (fds[ANSWER_FD], ANSWER, False), False)]
    found.append((os.closerange, (FIRST_FREE, 1 << 30), False))
    if "numpy.random" in sys.modules:
        found.append((harness.draw_own_random_numbers, (), False))
    return [*found, (gc.enable, (), False), (os.write, (NOTE, wire.READY_NOTE), False)]


def become_program(run: Start, fds: Sequence[int], steps: Sequence[Step]) -> int:
    """In the child: the program's exit code. Until the ready note is written, a failure is the sandbox's."""
    mode = run.mode
    try:
        source = os.pread(fds[SOURCE_FD], run.source_bytes if mode != wire.BINARY else 0, 0)
        take(steps)
    except (OSError, ValueError) as error:
        os.write(fds[NOTE_FD], wire.FAILED_NOTE + str(error).encode())
        return wire.FAILED_EXIT
    if mode == wire.COMPILE:
        return native.compile_program(source, ANSWER)
    if mode == wire.BINARY:
        return native.become(ASK)
    harness.remember_source(source)
    if mode in _WITHOUT_ANSWER:
        supply = harness.supply_names if mode == wire.JUDGED else None
        return harness.run_program(source, mode == wire.ECHO, NOTE, supply)
    if mode == wire.CELLS:
        return harness.serve_cells(NOTE, ASK, ANSWER)
    payload = json.loads(os.pread(ASK, os.fstat(ASK).st_size, 0))
    os.close(ASK)
    run_one = harness.run_tests if mode == wire.TESTS else harness.run_call
    return run_one(source, payload, NOTE, lambda frame: harness.write_bytes(ANSWER, frame))


# --- Import paths of children, and the descriptors by which they reach directories.


_LIB_FD, _PACKAGES_FD = 3, 7  # beside the child's own numbers


def hold(path: str, fd: int) -> None:
    """Open a path with O_PATH, because children share the descriptor: O_PATH has no offset, flags or owner to set."""
    opened = os.open(path, os.O_PATH)
    if opened != fd:
        os.dup2(opened, fd)
        os.close(opened)


def _reachable(path: str) -> bool:
    """Whether any user could walk there."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


class ImportPaths:
    """Import paths of children. Directories that their users could not reach (a root-only home) are named by
    descriptor, except at tier 2, which mounts them at their own paths."""

    def __init__(self, tier: str, packages: dict[str, str], link_dir: str) -> None:
        self._by_name = tier == "2" or os.getuid() != 0
        self.library = os.path.dirname(os.__file__)
        # Placeholders: an open directory that is not needed would be a way past the root of tier 2.
        for fd in (_LIB_FD, NOTE, ASK, ANSWER, _PACKAGES_FD):
            hold("/dev/null", fd)
        shown = self._shown(self.library, _LIB_FD)
        self.moves = {self.library: shown}
        self.readable = [self.library]
        sys.path[:] = [shown, f"{shown}/lib-dynload"]
        self._show_packages(packages, link_dir)

    def _shown(self, directory: str, fd: int) -> str:
        """The directory under the name that children use."""
        if self._by_name or _reachable(directory):
            return directory
        hold(directory, fd)
        return f"/proc/self/fd/{fd}"

    def _show_packages(self, packages: dict[str, str], link_dir: str) -> None:
        """The packages that programs may import, and no other of the same directory: as links in one of our own."""
        if not packages:
            return
        site = os.path.dirname(next(iter(packages.values())))
        base = self._shown(site, _PACKAGES_FD)
        self.readable += [link_dir, *packages.values()]
        for name, path in packages.items():
            link = os.path.join(link_dir, name)
            if os.path.dirname(path) == site:
                try:
                    os.symlink(os.path.join(base, os.path.basename(path)), link)
                except FileExistsError:  # another profile's fork server was here
                    pass
        self.moves[site] = base
        sys.path.append(link_dir)

    def relocate(self) -> None:
        """Packages that are loaded find their parts by the same way as children do."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__path__", None)
            if not isinstance(path, list):
                continue
            for real, shown in self.moves.items():
                path[:] = [part.replace(real, shown, 1) if part.startswith(real) else part for part in path]


# --- The fork server's process.


_SIGINT, _SIGKILL, _SIGCHLD = 2, 9, 17  # without the detour through enums
_SIGNAL_BYTES, _SIGNAL_SET_BYTES = 128, 128  # of signalfd's record, and of a set of signals in the C library
_FD_BYTES = 4
# Imported before any fork, because cheap and common. Anything else is read from disk by the child: random and
# statistics, for one, hook into every fork and would cost each program 0.2 ms.
_PRELOADED = ("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
              "itertools", "json", "math", "operator", "re", "string", "time", "typing")  # fmt: skip
_SCIENTIFIC = ("numpy", "numpy.fft", "numpy.linalg", "numpy.random", "sympy")  # numpy leaves its parts for later


def _open_builtins() -> None:
    """``exit`` and ``quit``, which the site module would have added."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))


def _open_streams() -> None:
    """stdout and stderr that know that they cannot seek, because a program's are pipes: a stream asks that once."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        usual, (read, write), kept = getattr(sys, name), os.pipe(), os.dup(fd)
        os.dup2(write, fd)
        stream = open(fd, "w", encoding=usual.encoding, errors=usual.errors, closefd=False)  # noqa: SIM115 - stays open
        stream.reconfigure(line_buffering=usual.line_buffering)
        stream.buffer.raw.name = usual.name  # type: ignore[attr-defined]
        os.dup2(kept, fd)
        for opened in (read, write, kept):
            os.close(opened)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _import_if_there(names: Sequence[str]) -> None:
    """A gateway without these still runs programs that only might import them."""
    for name in names:
        try:
            __import__(name)
        except ImportError:
            continue


def _warm_up_sympy() -> None:
    """The first steps of algebra load modules and fill caches: 0.2 s that no child pays again."""
    sympy = sys.modules.get("sympy")
    if sympy is None:
        return
    x = sympy.Symbol("x")
    sympy.solve(x**2 - 3 * x + 1, x)
    sympy.factor(sympy.expand((x + 1) ** 3))
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.integrate(x * sympy.cos(x), (x, 0, 1))
    sympy.Matrix([[1, 2], [3, 4]]).det()
    sympy.sympify("x + 1")
    str(sympy.nsimplify(0.5))


class ForkServerChild:
    """Answers one supervisor over a seqpacket socket until that closes."""

    def __init__(self, channel: _socket.socket, settings: dict[str, Any]) -> None:
        """``channel``: without the wrapper of ``socket``, whose modules each fork would copy."""
        self._channel = channel
        self._space = _socket.CMSG_LEN(wire.MAX_FDS * _FD_BYTES)
        self._runs: dict[int, int] = {}  # pid of a live child: its run
        self._profile = settings["profile"]
        self._confinement: Confinement | Exception
        try:
            paths = ImportPaths(settings["tier"], settings["packages"], settings["link_dir"])
            paths.relocate()
            for name in _PRELOADED:
                __import__(name)
            if self._profile == "scientific":
                _import_if_there(_SCIENTIFIC)
                _warm_up_sympy()
            if self._profile == "native":
                native.choose_standard()
            sys.set_int_max_str_digits(0)  # programs print integers of any length; their CPU time is limited
            if procfs.num_threads(os.getpid()) != 1:
                raise OSError("a preloaded library has started threads, which do not survive a fork")
            paths.relocate()
            _open_builtins()
            _open_streams()
            os.environ.pop(BOUND_AT_START, None)
            os.environ["HOME"] = os.environ["TMPDIR"] = "."  # each child's work dir
            tools = {"native": native.TOOL_TREES, SHELL: native.SHELL_TREES}.get(self._profile, [])
            links = settings["links"] if self._profile == SHELL else None
            confinement = Confinement(settings["tier"], settings["slot_dirs"], paths.readable, tools,
                                      links)  # fmt: skip
            harness.warm_up()
            confinement.prepare_parent()
            self._confinement = confinement
        except (OSError, ImportError) as error:  # reported to the first run: the probe
            self._confinement = error
        # No program finds them by name. Here and not in each child, which would copy fifty pages in taking them apart.
        own = [name for name in sys.modules if name == "bare" or name.startswith("bare.")]
        self._own_modules = [sys.modules.pop(name) for name in own]
        self._kept = sys.modules["__main__"], sys.argv  # that children replace, and would free

    def serve(self) -> None:
        ended = _descriptor_of_ended_children()
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(ended, select.POLLIN)
        gc.collect()
        gc.freeze()  # fewer pages are copied when a child's collector runs
        gc.disable()  # a child begins with its collector's counts at zero, not with a collection that is due
        while True:
            for fd, _ in poll.poll():
                if fd == ended:
                    os.read(ended, _SIGNAL_BYTES)
                    self._reap()
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        try:
            data, received, _, _ = self._channel.recvmsg(wire.START_STRUCT.size, self._space)
        except ConnectionResetError:  # the supervisor was killed
            return False
        if not data:
            return False
        run = Start(*wire.START_STRUCT.unpack(data))
        if run.kind in (wire.KILL, wire.INTERRUPT):
            for pid in [pid for pid, owner in self._runs.items() if owner == run.run]:
                os.kill(pid, _SIGKILL if run.kind == wire.KILL else _SIGINT)
            if run.kind == wire.INTERRUPT:
                self._send(wire.INTERRUPTED, run.run, 0, 0, 0.0, 0)
            return True
        packed = received[0][2]
        fds = struct.unpack(f"{len(packed) // _FD_BYTES}i", packed)
        try:
            if isinstance(self._confinement, Exception):
                raise OSError(str(self._confinement))
            pid = self._fork(self._confinement, run, fds)
        except OSError as error:  # the machine is out of processes or memory: this run's misfortune only
            os.write(fds[NOTE_FD], wire.FAILED_NOTE + str(error).encode())
            self._send(wire.ENDED, run.run, 0, 0, 0.0, 0)
        else:
            self._runs[pid] = run.run
            self._send(wire.STARTED, run.run, pid, 0, 0.0, 0)
        for fd in fds:
            os.close(fd)
        return True

    @staticmethod
    def _fork(confinement: Confinement, run: Start, fds: Sequence[int]) -> int:
        """The child's pid; never returns in the child."""
        steps = steps_of(confinement, run, fds)
        namespaced = len(fds) > NAMESPACE_FD
        if namespaced:
            confinement.set_namespace(fds[NAMESPACE_FD])
        pid = -1
        try:
            pid = os.fork()
            if pid == 0:
                exit_code = wire.FAILED_EXIT
                try:
                    exit_code = become_program(run, fds, steps)
                finally:
                    os._exit(exit_code)
        finally:
            if namespaced:
                confinement.set_namespace(None)
        return pid

    def _send(self, *fields: Any) -> None:
        try:
            self._channel.send(wire.ENDED_STRUCT.pack(*fields))
        except (BrokenPipeError, ConnectionResetError):  # the supervisor has gone: the next read says so
            pass

    def _reap(self) -> None:
        while self._runs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            cpu_s = usage.ru_utime + usage.ru_stime
            self._send(wire.ENDED, self._runs.pop(pid), pid, status, cpu_s, usage.ru_maxrss * 1024)


def _descriptor_of_ended_children() -> int:
    """Readable when a child has ended. The signal is blocked, which children undo: a handler would be a call of Python in
    memory that is shared with children, and so a copy of each page that the call touches."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_SIGCHLD,))
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = (1 << (_SIGCHLD - 1)).to_bytes(_SIGNAL_SET_BYTES, sys.byteorder)
    fd: int = libc.signalfd(-1, wanted, os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return fd


def main() -> None:
    """``argv``: channel descriptor, settings (tier, profile, slot_dirs, packages, link_dir) as JSON."""
    channel = _socket.socket(fileno=int(sys.argv[1]))
    ForkServerChild(channel, json.loads(sys.argv[2])).serve()
