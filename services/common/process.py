"""What a child process does for its parent: leave when the parent is gone.

Run as a script, it does so for a program that knows nothing of it: ``process.py PARENT_PID PROGRAM [ARGUMENTS]`` takes
the program's place. Imports the standard library alone, so any interpreter can run it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

DIE_WITH_PARENT = "MILLRACE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent_if_asked() -> None:
    """Ask the kernel for SIGTERM when the parent dies, if the launcher wrote its pid into the environment.

    Without it a launcher that is killed with -9 would leave a whole run behind. Linux only; elsewhere nothing happens.
    """
    parent = os.environ.get(DIE_WITH_PARENT)
    if parent is not None:
        _die_with(int(parent), signal.SIGTERM)


def bound_to_this_process(command: Sequence[str]) -> list[str]:
    """A command line that the kernel kills with SIGKILL when the thread that starts it ends, by whatever death."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def _die_with(parent: int, how: signal.Signals) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above, or somebody else started us
        os.kill(os.getpid(), how)


if __name__ == "__main__":
    _die_with(int(sys.argv[1]), signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])  # which keeps what was asked of the kernel
