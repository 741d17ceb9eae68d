"""What a child process does for its parent: leave when the parent is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
