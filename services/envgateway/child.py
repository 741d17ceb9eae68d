"""A child interpreter that answers one question at a time over a socket pair, and can be killed at any moment.

Knows nothing about what is asked: frames are those of ``sandbox/bare/wire.py``. The child is a fresh interpreter, by exec
and never by fork: no handler of grpc runs and no secret of our environment goes along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.process import DIE_WITH_PARENT
from services.envgateway.sandbox.bare import wire

_ROOT = str(Path(__file__).resolve().parents[2])


class ChildDied(Exception):
    """It ended without an answer."""


def spawn(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python -m module <descriptor> *arguments`` in a group of its own; returns it and our end of its channel.

    The child finds DIE_WITH_PARENT in its environment, and the descriptors ``pass_fds`` under their numbers.
    """
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)]),
            DIE_WITH_PARENT: str(os.getpid()),
            **(environment or {}),
        },
        cwd="/",
        pass_fds=[theirs.fileno(), *pass_fds],
        start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which then ends this
    )
    theirs.close()
    ours.setblocking(False)
    return process, ours


class Child:
    """One process, in a group of its own, and our end of its channel. ``kill`` ends it; nothing else does."""

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Runs ``python -m module <descriptor> *arguments``; the child finds DIE_WITH_PARENT in its environment."""
        self._process, self._channel = spawn(module, arguments, environment)
        self._frames = wire.FrameReader()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """The head of its answer. Raises ``ChildDied``; has no deadline of its own."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChildDied from error
        return await self.next_answer()

    async def next_answer(self) -> dict[str, Any]:
        """What it says unasked, such as that it is ready. Raises ``ChildDied``."""
        while True:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._channel, 1 << 16)
            except ConnectionResetError as error:
                raise ChildDied from error
            if not data:
                raise ChildDied
            for head, _ in self._frames.feed(data):
                return head

    def kill(self) -> None:
        """It and whatever it started. Nobody may be waiting for an answer."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()  # it was killed: this takes as long as the kernel needs
