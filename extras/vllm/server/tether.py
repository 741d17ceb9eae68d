"""Ends a worker, and its whole process group, with the server process: vLLM's engine process outlives a killed server.

The kernel kills the server itself with the service; the processes that vLLM starts below the server do not notice.
"""

from __future__ import annotations

import os
import select
import signal
import threading

SERVER = "ROLLMILL_SERVER_PID"  # the variable in which the launcher gives its process id


def end_with_server() -> None:
    """Watch the server in a thread; kill this process group when the server has ended. No effect outside a launcher."""
    pid = os.environ.get(SERVER)
    if pid is None:
        return
    threading.Thread(target=_watch, args=(int(pid),), name="tether", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        server = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        select.select([server], [], [])  # readable when the process has ended
    os.killpg(os.getpgrp(), signal.SIGKILL)
