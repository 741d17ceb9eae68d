"""Prepares a process for the streams, signals and proxies that it inherits."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any


def settle(*, outlives_output: bool = True) -> None:
    """Call first, before files are opened and processes are started.

    ``outlives_output``: output that cannot be written (the reader left, the disk is full) is dropped; else the error is raised.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: a file of ours would get its number, and the output of libraries
            nothing = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nothing, True)
            setattr(sys, name, open(nothing, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number and outlives_output:
            raw = io.BufferedWriter(_Droppable(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, getattr(sys, name).encoding, "replace", line_buffering=True))
        elif number:
            getattr(sys, name).reconfigure(errors="replace")  # a sign that the terminal lacks
    for name in ("PYTHONIOENCODING", "PYTHONOPTIMIZE"):  # of this terminal; and transformers needs docstrings
        os.environ.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would not tell how a child ended
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reach_directly()


def reach_directly(*hosts: str) -> None:
    """Exempt loopback and ``hosts`` from the proxies of the environment, for HTTP clients here and in child processes."""
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        given = [place.strip() for place in os.environ.get(name, os.environ.get(other, "")).split(",") if place.strip()]
        if "*" not in given:  # which some clients take as a word of its own, and not as a part of a list
            os.environ[name] = ",".join(dict.fromkeys([*given, "127.0.0.1", "localhost", "::1", *hosts]))


class _Droppable(io.FileIO):
    def write(self, data: Any) -> int:
        """Write if possible; returns the length in any case."""
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)
