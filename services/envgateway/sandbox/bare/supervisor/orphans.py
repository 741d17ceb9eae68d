"""Processes without a run: orphans of programs, and other processes that the kernel counts with a program's own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence, Set

from .. import procfs
from ..forkserver.fork_servers import ForkServers
from .run import Run

_COUNT_USER_EVERY_S = 1.0


class Orphans:
    """Processes that this process, the child subreaper, has adopted."""

    def __init__(self, tier: str, forks: ForkServers, helpers: Set[int]) -> None:
        """``helpers``: our own children that are no fork servers."""
        self._tier = tier
        self._forks = forks
        self._helpers = helpers
        self._pid = os.getpid()
        self._user_tasks = 0
        self._count_again = 0.0

    def found(self) -> list[int]:
        """Children of ours that we did not start. At tier 2 there are none: the first process of each pid namespace adopts them."""
        if self._tier == "2":
            return []
        ours = self._forks.pids | self._helpers
        return [pid for pid in procfs.children(self._pid) if pid not in ours]

    def reap(self, runs: Sequence[Run]) -> None:
        """Reap the dead, and charge them to the run of their user."""
        while True:
            try:
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if state is None:
                return
            _, _, usage = os.wait4(state.si_pid, 0)
            for run in runs:
                if run.slot.own_user and run.slot.uid == state.si_uid:
                    run.strays_cpu_s += usage.ru_utime + usage.ru_stime

    def num_others_of_user(self) -> int:
        """Processes that the kernel counts with a program's own: at tier 0 those of the gateway's user.

        Without a limit in the kernel a fork bomb doubles in less time than passes between two looks.
        """
        if self._tier != "0":
            return 0
        now = time.monotonic()
        if now >= self._count_again:
            self._user_tasks = procfs.num_tasks_of(os.getuid())
            self._count_again = now + _COUNT_USER_EVERY_S
        return self._user_tasks
