"""Starts the supervisor's fork servers, one per profile, and replaces worn and dead ones.

The supervisor decides which run uses which profile, and handles the end of a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from .. import messages, procfs
from ..messages import BOUND_AT_START, PLAIN

BARE_FLAGS = ("-I", "-S", "-X", "utf8")
_LOWEST_CHANNEL_FD = 10  # below are the descriptors that a fork server gives fixed numbers
_MAX_DEATHS = 5  # in a row, without one program ended
_LOOK_AT_GROWTH_EVERY = 500
_MOST_GROWTH_BYTES = 64 << 20
_END_S, _END_LOOK_S = 10.0, 0.001  # of a fork server that is dying


class ForkServerDiedError(Exception):
    """The plain fork server cannot be kept alive: there is no sandbox."""


class ForkServer:
    """One fork server process, and its unfinished runs."""

    def __init__(self, profile: str, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD, _LOWEST_CHANNEL_FD)
        theirs.close()
        package = os.path.abspath(__file__).rsplit(os.sep, 3)[0]  # parent of the package ``bare``
        boot = f"import sys; sys.path.append({package!r}); from bare.forkserver.forkserver_child import main; main()"
        told = json.dumps({**settings, "profile": profile})
        arguments = [sys.executable, *BARE_FLAGS, "-c", boot, str(fd), told]
        # libraries are bound once at the start, not by each child; the fork server removes the variable for programs
        self.pid = os.posix_spawn(sys.executable, arguments, {**os.environ, BOUND_AT_START: "1"})
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
        """True after many runs, or after growth; called once per start of a run."""
        self._started += 1
        if self._started % _LOOK_AT_GROWTH_EVERY == 1:
            size = procfs.resident_bytes(self.pid)
            self._first_bytes = self._first_bytes or size
            if size > self._first_bytes + _MOST_GROWTH_BYTES and self._started > 1:
                return True
        return bool(self._started > self._most_runs)


class ForkServers:
    """All fork servers, registered with the supervisor's epoll."""

    def __init__(self, epoll: select.epoll, settings: dict[str, Any]) -> None:
        self._epoll = epoll
        self._settings = settings
        self._current: dict[str, ForkServer] = {}
        self._by_fd: dict[int, ForkServer] = {}
        self._deaths: dict[str, int] = {}

    def get(self, profile: str) -> ForkServer:
        """The profile's, started when there is none; the plain one where the profile's cannot live."""
        if self._deaths.get(profile, 0) > _MAX_DEATHS:
            profile = PLAIN
        server = self._current.get(profile)
        if server is not None and server.is_worn():
            del self._current[profile]
            self._retire_when_idle(server)
            server = None
        return server if server is not None else self.start(profile)

    def start(self, profile: str) -> ForkServer:
        server = ForkServer(profile, self._settings)
        self._current[profile] = server
        self._by_fd[server.channel.fileno()] = server
        self._epoll.register(server.channel, select.EPOLLIN)
        return server

    def of_fd(self, fd: int) -> ForkServer | None:
        return self._by_fd.get(fd)

    @property
    def pids(self) -> set[int]:
        return {server.pid for server in self._by_fd.values()}

    def receive(self, server: ForkServer) -> tuple[Any, ...] | None:
        """The next message; None when the fork server has died."""
        try:
            data = server.channel.recv(messages.ENDED_STRUCT.size)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        message = messages.ENDED_STRUCT.unpack(data)
        if message[0] == messages.ENDED:
            self._deaths[server.profile] = 0
            server.runs.discard(message[1])
            self._retire_when_idle(server)
        return message

    def died(self, server: ForkServer) -> set[int]:
        """Remove a dead fork server; returns its runs. The next run of its profile starts another one.

        Raises:
            ForkServerDiedError: the plain fork server has died too often in a row.
        """
        self._forget(server)
        _await_end(server.pid)
        self._deaths[server.profile] = self._deaths.get(server.profile, 0) + 1
        if server.profile == PLAIN and self._deaths[PLAIN] > _MAX_DEATHS:
            raise ForkServerDiedError(f"the fork server died {self._deaths[PLAIN]} times in a row")
        return server.runs

    def close(self) -> None:
        for server in list(self._by_fd.values()):
            self._forget(server)
            try:
                os.waitpid(server.pid, 0)
            except ChildProcessError:  # already reaped with the strays
                pass

    def _retire_when_idle(self, server: ForkServer) -> None:
        if self._current.get(server.profile) is not server and not server.runs and not self._is_forgotten(server):
            self._forget(server)  # the fork server ends with its channel, and is reaped with the strays

    def _is_forgotten(self, server: ForkServer) -> bool:
        return server.channel.fileno() not in self._by_fd

    def _forget(self, server: ForkServer) -> None:
        self._epoll.unregister(server.channel)
        del self._by_fd[server.channel.fileno()]
        if self._current.get(server.profile) is server:
            del self._current[server.profile]
        server.channel.close()


def _await_end(pid: int) -> None:
    """Wait until a fork server whose channel has closed is dead. The kernel closes the channel before it kills the programs
    of the fork server and gives them to their new parent; until then no slot shows that it still has a process.

    Raises:
        ForkServerDiedError: the fork server does not end. A new supervisor ends what is left.
    """
    latest = time.monotonic() + _END_S
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > latest:
                raise ForkServerDiedError(f"the fork server {pid} has not ended {_END_S:g} s after SIGKILL")
            os.kill(pid, signal.SIGKILL)
            time.sleep(_END_LOOK_S)
    except ChildProcessError:  # already reaped with the strays
        pass
