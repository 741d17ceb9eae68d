"""How a child process ends: with its parent, and without tearing down what other threads still use."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

DIE_WITH_PARENT = "MILLRACE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent_if_asked() -> None:
    """Ask the kernel for SIGTERM when the parent dies, if the launcher wrote its pid into the environment.

    Without it a launcher that is killed with -9 would leave a whole run behind. Linux only; elsewhere nothing happens.
    """
    parent = os.environ.get(DIE_WITH_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above, or somebody else started us
        os.kill(os.getpid(), signal.SIGTERM)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Leave with the exit code of ``main``, everything written, but without tearing down the interpreter.

    For processes that were in a gloo group: its worker threads may be about to drop the last reference to a tensor, for
    which they ask for the interpreter; one that is being torn down ends the thread inside a destructor, and the process
    dies of SIGABRT ("terminate called without an active exception") after its work was done.
    """
    exit_code = 1
    try:
        exit_code = main()
    finally:
        kind, error, trace = sys.exc_info()
        if isinstance(error, SystemExit):  # of an argument that was wrong, told already
            exit_code = int(error.code or 0)
        elif kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
