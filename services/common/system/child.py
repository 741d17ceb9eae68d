"""Ends a child process with its parent; memory that other threads still use stays intact.

As a script, ``process.py PARENT_PID PROGRAM [ARGUMENTS]``, it binds itself to the parent, then executes the program.
Imports the standard library only, so any interpreter can run it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

DIE_WITH_PARENT = "ROLLMILL_DIE_WITH_PARENT"
START_AGAIN = os.EX_TEMPFAIL  # exit code of a process that has lost a dependency it needs: a new one may succeed
LEFT = 4  # exit code of a replica that left in order, under a launcher: a function of the user can end a process with 0
_PR_SET_PDEATHSIG = 1
_START = str(Path(__file__).resolve().parents[2] / "start.py")


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """A command line that runs a module of Rollmill, also beside a user's folder ``services`` in the current directory."""
    return (sys.executable, "-P", _START, module, *arguments)


def module_in(command: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Module and arguments of a command line of ``module_command``; raises ``ValueError`` for another one."""
    if len(command) < 4 or command[2] != _START:
        raise ValueError(f"no command line of module_command: {' '.join(command)}")
    return command[3], tuple(command[4:])


def die_with_parent_if_asked(how: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for SIGTERM, or another signal, when the parent dies, if the launcher wrote its pid into the
    environment.

    Without it a launcher that is killed with -9 would leave a whole run behind. Linux only; no effect elsewhere.
    """
    parent = os.environ.get(DIE_WITH_PARENT)
    if parent is not None:
        _die_with(int(parent), how)


def limit_memory(size_bytes: int) -> None:
    """Bound this process's address space, and leave no core behind."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size_bytes = size_bytes if hard == resource.RLIM_INFINITY else min(hard, size_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_to_this_process(command: Sequence[str]) -> list[str]:
    """A command line for a process that the kernel kills (SIGKILL) at the end of the starting thread."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def _die_with(parent: int, how: signal.Signals) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above, or another process started us
        os.kill(os.getpid(), how)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Leave with the exit code of ``main``, everything written, but without tearing down the interpreter.

    For processes that were in a gloo group: its worker threads may be about to drop the last reference to a tensor, for
    which they ask for the interpreter; one that is being torn down ends the thread inside a destructor, and the process
    dies of SIGABRT ("terminate called without an active exception") after its work was done. For forked processes too.
    """
    exit_code = 1
    try:
        exit_code = main()
    finally:
        kind, error, trace = sys.exc_info()
        if isinstance(error, SystemExit):  # as the interpreter takes it: a code, or words to say
            exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
            sys.stderr.write(f"{error.code}\n" if isinstance(error.code, str) else "")
        elif kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    _die_with(int(sys.argv[1]), signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])  # which keeps what was asked of the kernel
