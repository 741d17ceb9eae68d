"""The fork server: a warm interpreter that forks one confined child per run and says how each ended.

It is handed descriptors, never contents: a program's text is read by its child, so no child finds another's
program, input or output in the memory that it inherits. Limits are the supervisor's business.

A profile says what is warm: ``plain`` the common part of the standard library, ``scientific`` numpy and sympy on top,
``native`` nothing: its children may execute, and become the compiler or what it made.
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

from . import calls, cells, checker, messages, native, procfs, program
from .confine import Confinement
from .messages import ANSWER_FD, ASK_FD, NAMESPACE_FD, NOTE_FD, SOURCE_FD, Start

# The child's own numbers; the zygote keeps them taken, so that no descriptor that it receives has one of them.
_LIB_FD, _NOTE, _ASK, _ANSWER, _PACKAGES_FD = 3, 4, 5, 6, 7
_FIRST_FREE_FD = 8
# Imported before any fork, because cheap and common. Anything else is read from disk by the child: random and
# statistics, for one, hook into every fork and would cost each program 0.2 ms.
_PRELOADED = ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
              "json", "math", "operator", "re", "string", "time", "typing")  # fmt: skip
_SCIENTIFIC = ("numpy", "numpy.fft", "numpy.linalg", "numpy.random", "sympy")  # numpy leaves its parts for later


def _hold(path: str, fd: int) -> None:
    """Children share what is open here, so it is open as a place only, which has no offset, flags or owner to set."""
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
    """Where children import from. Directories that their users could not walk to (a root-only home) go by descriptor,
    except at tier 2, whose root shows them where they are."""

    def __init__(self, tier: str, packages: dict[str, str], link_dir: str) -> None:
        self._by_name = tier == "2" or os.getuid() != 0
        self.library = os.path.dirname(os.__file__)
        # Taken, and nothing in them: a directory that is not needed would be a way past the root of tier 2.
        for fd in (_LIB_FD, _NOTE, _ASK, _ANSWER, _PACKAGES_FD):
            _hold("/dev/null", fd)
        shown = self._shown(self.library, _LIB_FD)
        self.moves = {self.library: shown}
        self.readable = [self.library]
        sys.path[:] = [shown, f"{shown}/lib-dynload"]
        self._show_packages(packages, link_dir)

    def _shown(self, directory: str, fd: int) -> str:
        """The directory as children name it."""
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
                except FileExistsError:  # another profile's zygote was here
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


class Zygote:
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
            os.environ["HOME"] = os.environ["TMPDIR"] = "."  # each child's work dir
            # found once: walking all modules in a child would copy a page for nearly each
            self._own_modules = [name for name in sys.modules if name == "bare" or name.startswith("bare.")]
            tools = native.TOOL_TREES if self._profile == "native" else []
            self._confinement = Confinement(settings["tier"], settings["slot_dirs"], paths.readable, tools,
                                             settings["accounted"])  # fmt: skip
            self._confinement.prepare_parent()
        except (OSError, ImportError) as error:  # told to whoever asks for a run: the probe
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
                self._confinement.apply(run, self._pid, compiling=run.mode == messages.COMPILE)
                ask = ASK_FD if run.mode != messages.BINARY else SOURCE_FD
                for target, fd in ((_NOTE, NOTE_FD), (_ASK, ask), (_ANSWER, ANSWER_FD)):
                    os.dup2(fds[fd], target, inheritable=False)
            except (OSError, ValueError) as error:
                os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
                return
            os.closerange(_FIRST_FREE_FD, 1 << 30)
            if "numpy.random" in sys.modules:
                # or every program would draw the same numbers; without a seed it would import OpenSSL to make one
                sys.modules["numpy"].random.seed(list(os.urandom(16)))
            os.write(_NOTE, messages.READY_NOTE)
            for name in self._own_modules:
                del sys.modules[name]
            exit_code = self._run(run.mode, source)
        finally:
            os._exit(exit_code)

    def _run(self, mode: bytes, source: bytes) -> int:
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
            return calls.run_one(source, payload, _NOTE, _ANSWER)
        if mode == messages.CELLS:
            return cells.serve(_NOTE, _ASK, _ANSWER)
        if mode == messages.SESSION:
            return calls.serve(source, _NOTE, _ASK, _ANSWER)
        return checker.run(source, _NOTE, _ASK, _ANSWER)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def main() -> None:
    """``argv``: channel descriptor, settings (tier, profile, slot_dirs, packages, link_dir, accounted) as JSON."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    Zygote(channel, json.loads(sys.argv[2])).serve()
