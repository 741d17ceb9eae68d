"""The supervisor's hold on its fork servers: one zygote a profile, started ahead, replaced when worn or dead.

Knows how to start, feed and retire a zygote; which run wants which profile is told, and what its end means is the
supervisor's business.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any

from . import messages, procfs

BARE_FLAGS = ("-I", "-S", "-X", "utf8")
_LOWEST_CHANNEL_FD = 10  # below are the descriptors that a zygote gives fixed numbers
_MAX_DEATHS = 5  # in a row, without one program ended
_LOOK_AT_GROWTH_EVERY = 500
_MOST_GROWTH_BYTES = 64 << 20
PLAIN = "plain"


class ZygoteDied(Exception):
    """The plain fork server cannot be kept alive: there is no sandbox."""


class Zygote:
    """One fork server process, and the runs that it has not ended yet."""

    def __init__(self, profile: str, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD, _LOWEST_CHANNEL_FD)
        theirs.close()
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        boot = f"import sys; sys.path.append({package!r}); from bare.zygote import main; main()"
        told = json.dumps({**settings, "profile": profile})
        arguments = [sys.executable, *BARE_FLAGS, "-c", boot, str(fd), told]
        self.pid = os.posix_spawn(sys.executable, arguments, dict(os.environ))
        os.close(fd)
        self.profile = profile
        self.channel = ours
        self.runs: set[int] = set()
        self._started = 0
        self._most_runs = settings["runs"]
        self._first_bytes = 0

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.channel, [message], fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end of file is the next event, and marks its runs

    def is_worn(self) -> bool:
        """After many runs, or when it has grown: asked once per start of a run."""
        self._started += 1
        if self._started % _LOOK_AT_GROWTH_EVERY == 1:
            size = procfs.resident_bytes(self.pid)
            self._first_bytes = self._first_bytes or size
            if size > self._first_bytes + _MOST_GROWTH_BYTES and self._started > 1:
                return True
        return bool(self._started > self._most_runs)


class ForkServers:
    """All zygotes, registered with the supervisor's epoll."""

    def __init__(self, epoll: select.epoll, settings: dict[str, Any]) -> None:
        self._epoll = epoll
        self._settings = settings
        self._current: dict[str, Zygote] = {}
        self._by_fd: dict[int, Zygote] = {}
        self._deaths: dict[str, int] = {}

    def zygote(self, profile: str) -> Zygote:
        """The profile's, started when there is none; the plain one where the profile's cannot live."""
        if self._deaths.get(profile, 0) > _MAX_DEATHS:
            profile = PLAIN
        zygote = self._current.get(profile)
        if zygote is not None and zygote.is_worn():
            del self._current[profile]
            self._retire_when_idle(zygote)
            zygote = None
        return zygote if zygote is not None else self.start(profile)

    def start(self, profile: str) -> Zygote:
        zygote = Zygote(profile, self._settings)
        self._current[profile] = zygote
        self._by_fd[zygote.channel.fileno()] = zygote
        self._epoll.register(zygote.channel, select.EPOLLIN)
        return zygote

    def of_fd(self, fd: int) -> Zygote | None:
        return self._by_fd.get(fd)

    @property
    def pids(self) -> set[int]:
        return {zygote.pid for zygote in self._by_fd.values()}

    def receive(self, zygote: Zygote) -> tuple[Any, ...] | None:
        """A message of it; None when it has died."""
        try:
            data = zygote.channel.recv(messages.ENDED_STRUCT.size)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        message = messages.ENDED_STRUCT.unpack(data)
        if message[0] == messages.ENDED:
            self._deaths[zygote.profile] = 0
            zygote.runs.discard(message[1])
            self._retire_when_idle(zygote)
        return message

    def died(self, zygote: Zygote) -> set[int]:
        """Forget it; its runs are returned. The next run of its profile starts another.

        Raises:
            ZygoteDied: it was the plain one, and not the first in a row.
        """
        self._forget(zygote)
        self._deaths[zygote.profile] = self._deaths.get(zygote.profile, 0) + 1
        if zygote.profile == PLAIN and self._deaths[PLAIN] > _MAX_DEATHS:
            raise ZygoteDied(f"the fork server died {self._deaths[PLAIN]} times in a row")
        return zygote.runs

    def close(self) -> None:
        for zygote in list(self._by_fd.values()):
            self._forget(zygote)
            try:
                os.waitpid(zygote.pid, 0)
            except ChildProcessError:  # already reaped with the strays
                pass

    def _retire_when_idle(self, zygote: Zygote) -> None:
        if self._current.get(zygote.profile) is not zygote and not zygote.runs and not self._is_forgotten(zygote):
            self._forget(zygote)  # it ends at the end of its channel, and is reaped with the strays

    def _is_forgotten(self, zygote: Zygote) -> bool:
        return zygote.channel.fileno() not in self._by_fd

    def _forget(self, zygote: Zygote) -> None:
        self._epoll.unregister(zygote.channel)
        del self._by_fd[zygote.channel.fileno()]
        if self._current.get(zygote.profile) is zygote:
            del self._current[zygote.profile]
        zygote.channel.close()
