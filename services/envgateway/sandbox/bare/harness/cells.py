"""A live process: runs cells of code in one namespace, as a notebook does.

Frames in:  {"cell": n, "code": text}
Frames out: {"cell": n, "outcome": "ok" or "raised", "error": the name of the exception's type}

Output of a cell goes to stdout and stderr, which are flushed before the frame is written. SIGINT ends a cell, once, and
has no effect between cells; the supervisor bounds the time of a cell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from . import program
from .calls import read_frame, write_frame

_NOBODY = -1  # a note would be about the whole process


def serve(note_fd: int, ask_fd: int, answer_fd: int) -> int:
    """Run cells until ``ask_fd`` ends."""
    os.close(note_fd)
    own_pid = os.getpid()
    streams = [sys.stdout, sys.stderr]
    cells = _Cells()
    signal.signal(signal.SIGINT, cells.interrupt)
    while (frame := read_frame(ask_fd)) is not None:
        request = json.loads(frame)
        outcome = cells.run(f"<cell {request['cell']}>", request["code"])
        program.flush([sys.stdout, sys.stderr, *streams])
        if os.getpid() != own_pid:  # a process that the cell has forked and not ended: the answer is its parent's
            return 0
        write_frame(answer_fd, json.dumps({"cell": request["cell"], **outcome}))
    return 0


class _Cells:
    """The namespace, and whether one of its cells is being run."""

    def __init__(self) -> None:
        self._namespace = program.new_main("__main__").__dict__
        self._running = False

    def interrupt(self, *_: Any) -> None:
        if self._running:
            self._running = False
            raise KeyboardInterrupt

    def run(self, name: str, text: str) -> dict[str, str]:
        source = text.encode(errors="replace")
        program.remember_source(source, name)
        try:
            self._running = True
            try:
                program.execute_echoing(source, self._namespace, _NOBODY, name)
            finally:
                self._running = False
        except SystemExit as leaving:
            return _raised(leaving) if program.exit_code(leaving) else {"outcome": "ok", "error": ""}
        except BaseException as error:  # noqa: BLE001 - untrusted code may raise any error
            _forget_handler(error)
            program.report(error, _NOBODY, name)
            return _raised(error)
        return {"outcome": "ok", "error": ""}


def _forget_handler(error: BaseException) -> None:
    """Remove the handler that raised from an interrupted cell's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code is _Cells.interrupt.__code__:
            trace.tb_next = None
            return
        trace = trace.tb_next


def _raised(error: BaseException) -> dict[str, str]:
    return {"outcome": "raised", "error": type(error).__name__}
