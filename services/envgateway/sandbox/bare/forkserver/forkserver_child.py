"""The fork server: a warm interpreter that forks one confined child per run and reports the end of each.

The fork server receives descriptors, never contents: a child reads its program's text itself, so no child finds
another's program, input or output in inherited memory. The supervisor keeps the limits.

A profile names the preloaded modules: ``plain`` the common part of the standard library, ``scientific`` numpy and sympy
on top, ``native`` none: its children may execute, and become the compiler or its output. ``shell`` is ``plain`` with
children that may execute the machine's programs; only tier 2 has it.
"""

from __future__ import annotations

import _signal
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .. import messages, procfs
from ..confine.confinement import Confinement
from ..harness import calls, cells, checker, native, program
from ..messages import ANSWER_FD, ASK_FD, NAMESPACE_FD, NOTE_FD, SOURCE_FD, Start
from . import host
from .fork_servers import BOUND_AT_START, SHELL

# The child's own numbers; the fork server keeps them taken, so that no received descriptor has one of them.
_LIB_FD, _NOTE, _ASK, _ANSWER, _PACKAGES_FD = 3, 4, 5, 6, 7
# Imported before any fork, because cheap and common. Anything else is read from disk by the child: random and
# statistics, for one, hook into every fork and would cost each program 0.2 ms.
_PRELOADED = ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
              "json", "math", "operator", "re", "string", "time", "typing")  # fmt: skip
_SCIENTIFIC = ("numpy", "numpy.fft", "numpy.linalg", "numpy.random", "sympy")  # numpy leaves its parts for later


def _hold(path: str, fd: int) -> None:
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


class _Paths:
    """Import paths of children. Directories that their users could not reach (a root-only home) are named by
    descriptor, except at tier 2, which mounts them at their own paths."""

    def __init__(self, tier: str, packages: dict[str, str], link_dir: str) -> None:
        self._by_name = tier == "2" or os.getuid() != 0
        self.library = os.path.dirname(os.__file__)
        # Placeholders: an open directory that is not needed would be a way past the root of tier 2.
        for fd in (_LIB_FD, _NOTE, _ASK, _ANSWER, _PACKAGES_FD):
            _hold("/dev/null", fd)
        shown = self._shown(self.library, _LIB_FD)
        self.moves = {self.library: shown}
        self.readable = [self.library]
        sys.path[:] = [shown, f"{shown}/lib-dynload"]
        self._show_packages(packages, link_dir)

    def _shown(self, directory: str, fd: int) -> str:
        """The directory under the name that children use."""
        if self._by_name or _reachable(directory):
            return directory
        _hold(directory, fd)
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


def _open_builtins() -> None:
    """``exit`` and ``quit``, which the site module would have added."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))


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

    def __init__(self, channel: socket.socket, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._runs: dict[int, int] = {}  # pid of a live child: its run
        self._pid = os.getpid()
        self._profile = settings["profile"]
        self._confinement: Confinement | Exception
        try:
            paths = _Paths(settings["tier"], settings["packages"], settings["link_dir"])
            paths.relocate()
            for name in _PRELOADED:
                __import__(name)
            if self._profile == "scientific":
                _import_if_there(_SCIENTIFIC)
                _warm_up_sympy()
            if procfs.num_threads(self._pid) != 1:
                raise OSError("a preloaded library has started threads, which do not survive a fork")
            paths.relocate()
            _open_builtins()
            program.warm_up()
            host.warm_up()
            os.environ.pop(BOUND_AT_START, None)
            os.environ["HOME"] = os.environ["TMPDIR"] = "."  # each child's work dir
            tools = {"native": native.TOOL_TREES, SHELL: native.SHELL_TREES}.get(self._profile, [])
            links = settings["links"] if self._profile == SHELL else None
            self._confinement = Confinement(settings["tier"], settings["slot_dirs"], paths.readable, tools,
                                             settings["accounted"], links)  # fmt: skip
            self._confinement.prepare_parent()
        except (OSError, ImportError) as error:  # reported to the first run: the probe
            self._confinement = error
        # No program finds them by name. Here and not in each child, which would copy fifty pages in taking them apart.
        own = [name for name in sys.modules if name == "bare" or name.startswith("bare.")]
        self._own_modules = [sys.modules.pop(name) for name in own]

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up descriptor is written
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        gc.collect()
        gc.freeze()  # fewer pages are copied when a child's collector runs
        gc.disable()  # a child begins with its collector's counts at zero, not with a collection that is due
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, messages.START_STRUCT.size, messages.MAX_FDS)
        except ConnectionResetError:  # the supervisor was killed
            return False
        if not data:
            return False
        run = Start(*messages.START_STRUCT.unpack(data))
        if run.kind in (messages.KILL, messages.INTERRUPT):
            for pid in [pid for pid, owner in self._runs.items() if owner == run.run]:
                os.kill(pid, signal.SIGKILL if run.kind == messages.KILL else signal.SIGINT)
            if run.kind == messages.INTERRUPT:
                self._send(messages.INTERRUPTED, run.run, 0, 0, 0.0, 0)
            return True
        try:
            if isinstance(self._confinement, Exception):
                raise OSError(str(self._confinement))
            pid = self._confinement.fork(fds[NAMESPACE_FD] if len(fds) > NAMESPACE_FD else None)
        except OSError as error:  # the machine is out of processes or memory: this run's misfortune only
            os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
            self._send(messages.ENDED, run.run, 0, 0, 0.0, 0)
        else:
            if pid == 0:
                self._become_program(fds, run)
            self._runs[pid] = run.run
            self._send(messages.STARTED, run.run, pid, 0, 0.0, 0)
        for fd in fds:
            os.close(fd)
        return True

    def _send(self, *fields: Any) -> None:
        try:
            self._channel.send(messages.ENDED_STRUCT.pack(*fields))
        except (BrokenPipeError, ConnectionResetError):  # the supervisor has gone: the next read says so
            pass

    def _reap(self) -> None:
        while self._runs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            cpu_s = usage.ru_utime + usage.ru_stime
            self._send(messages.ENDED, self._runs.pop(pid), pid, status, cpu_s, usage.ru_maxrss * 1024)

    def _become_program(self, fds: list[int], run: Start) -> None:
        """Never returns. Until the ready note is written, a failure is the sandbox's, not the program's."""
        exit_code = messages.FAILED_EXIT
        try:
            assert isinstance(self._confinement, Confinement)
            signal.set_wakeup_fd(-1)
            _signal.signal(signal.SIGCHLD, 0)  # the default; without the detour through enums
            os.setsid()
            os.umask(0o077)
            source = _read_all(fds[SOURCE_FD]) if run.mode != messages.BINARY else b""
            for target, fd in enumerate(fds[messages.STDIN_FD : messages.STDERR_FD + 1]):
                os.dup2(fd, target)
            try:
                self._confinement.apply(run, self._pid)
                ask = ASK_FD if run.mode != messages.BINARY else SOURCE_FD
                for target, fd in ((_NOTE, NOTE_FD), (_ASK, ask), (_ANSWER, ANSWER_FD)):
                    os.dup2(fds[fd], target, inheritable=False)
            except (OSError, ValueError) as error:
                os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
                return
            inputs = fds[messages.NAMESPACE_FD + 1 :]  # each has a larger number than its target
            for place, fd in enumerate(inputs):
                os.dup2(fd, host.FIRST_INPUT_FD + place, inheritable=False)
            os.closerange(host.FIRST_INPUT_FD + len(inputs), 1 << 30)
            if run.mode != messages.CASES:
                program.draw_own_random_numbers()
                gc.enable()
            os.write(_NOTE, messages.READY_NOTE)
            exit_code = self._run(run, source)
        finally:
            os._exit(exit_code)

    def _run(self, run: Start, source: bytes) -> int:
        mode = run.mode
        if mode == messages.COMPILE:
            return native.compile_program(source, _ANSWER)
        if mode == messages.BINARY:
            return native.become(_ASK)
        program.remember_source(source)
        if mode in (messages.PROGRAM, messages.ECHO):
            os.closerange(_ASK, _ANSWER + 1)
            return program.run(source, mode == messages.ECHO, _NOTE)
        if mode == messages.CALL:
            payload = json.loads(_read_all(_ASK))
            os.close(_ASK)
            return calls.run_one(source, payload, _NOTE, lambda frame: calls.write_bytes(_ANSWER, frame))
        if mode == messages.CELLS:
            return cells.serve(_NOTE, _ASK, _ANSWER)
        if mode == messages.CASES:
            assert isinstance(self._confinement, Confinement)
            served = host.Host(self._confinement, run, source)
            for case in served.cases():  # done here, where the stack is as deep as in a run of its own
                if case.call is None:
                    case.exit_code = program.run(source, False, case.note_fd, case.code)
                else:
                    case.exit_code = calls.run_one(source, case.call, case.note_fd, case.tell, case.code)
            return served.exit_code
        if mode == messages.SESSION:
            return calls.serve(source, _NOTE, _ASK, _ANSWER)
        return checker.run(source, _NOTE, _ASK, _ANSWER)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def main() -> None:
    """``argv``: channel descriptor, settings (tier, profile, slot_dirs, packages, link_dir, accounted) as JSON."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    ForkServerChild(channel, json.loads(sys.argv[2])).serve()
