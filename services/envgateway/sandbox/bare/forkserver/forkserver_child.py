"""The fork server: a warm interpreter that forks one confined child per run and reports the end of each.

The fork server receives descriptors, never contents: a child reads its program's text itself, so no child finds
another's program, input or output in inherited memory. The supervisor keeps the limits.

A profile names the preloaded modules: ``plain`` the common part of the standard library, ``scientific`` numpy and sympy
on top, ``native`` none: its children may execute, and become the compiler or its output. ``shell`` is ``plain`` with
children that may execute the machine's programs; only tier 2 has it.
"""

from __future__ import annotations

import _signal
import _socket
import ctypes
import gc
import json
import os
import select
import struct
import sys
from collections.abc import Sequence
from typing import Any

from .. import messages, procfs
from ..confine.confinement import Confinement
from ..harness import native, program
from ..messages import BOUND_AT_START, NAMESPACE_FD, NOTE_FD, SHELL, Start
from .entry import become_program, steps_of
from .import_paths import ImportPaths

_SIGINT, _SIGKILL, _SIGCHLD = 2, 9, 17  # without the detour through enums
_SIGNAL_BYTES, _SIGNAL_SET_BYTES = 128, 128  # of signalfd's record, and of a set of signals in the C library
_FD_BYTES = 4
_USAGE, _RUSAGE_BYTES = struct.Struct("@lllll"), 18 * struct.calcsize("@l")  # its first five: times, and peak memory
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
        self._space = _socket.CMSG_LEN(messages.MAX_FDS * _FD_BYTES)
        self._runs: dict[int, int] = {}  # pid of a live child: its run
        # not os.wait4, which imports a module and makes sixteen numbers at each call, in memory that children share
        self._wait4 = ctypes.CDLL(None).wait4
        self._status, self._usage = ctypes.create_string_buffer(4), ctypes.create_string_buffer(_RUSAGE_BYTES)
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
                                      settings["accounted"], links)  # fmt: skip
            program.warm_up()
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
            data, received, _, _ = self._channel.recvmsg(messages.START_STRUCT.size, self._space)
        except ConnectionResetError:  # the supervisor was killed
            return False
        if not data:
            return False
        run = Start(*messages.START_STRUCT.unpack(data))
        if run.kind in (messages.KILL, messages.INTERRUPT):
            for pid in [pid for pid, owner in self._runs.items() if owner == run.run]:
                os.kill(pid, _SIGKILL if run.kind == messages.KILL else _SIGINT)
            if run.kind == messages.INTERRUPT:
                self._send(messages.INTERRUPTED, run.run, 0, 0, 0.0, 0)
            return True
        packed = received[0][2]
        fds = struct.unpack(f"{len(packed) // _FD_BYTES}i", packed)
        try:
            if isinstance(self._confinement, Exception):
                raise OSError(str(self._confinement))
            pid = self._fork(self._confinement, run, fds)
        except OSError as error:  # the machine is out of processes or memory: this run's misfortune only
            os.write(fds[NOTE_FD], messages.FAILED_NOTE + str(error).encode())
            self._send(messages.ENDED, run.run, 0, 0, 0.0, 0)
        else:
            self._runs[pid] = run.run
            self._send(messages.STARTED, run.run, pid, 0, 0.0, 0)
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
                exit_code = messages.FAILED_EXIT
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
            self._channel.send(messages.ENDED_STRUCT.pack(*fields))
        except (BrokenPipeError, ConnectionResetError):  # the supervisor has gone: the next read says so
            pass

    def _reap(self) -> None:
        while self._runs:
            pid = self._wait4(-1, self._status, os.WNOHANG, self._usage)
            if pid <= 0:
                return
            user_s, user_us, system_s, system_us, peak_kb = _USAGE.unpack_from(self._usage)
            cpu_s = user_s + system_s + 1e-6 * (user_us + system_us)
            status = int.from_bytes(self._status.raw, sys.byteorder)
            self._send(messages.ENDED, self._runs.pop(pid), pid, status, cpu_s, peak_kb * 1024)


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
    """``argv``: channel descriptor, settings (tier, profile, slot_dirs, packages, link_dir, accounted) as JSON."""
    channel = _socket.socket(fileno=int(sys.argv[1]))
    ForkServerChild(channel, json.loads(sys.argv[2])).serve()
