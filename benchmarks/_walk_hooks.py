"""Records each call of a function of services/ and its end, with the time. ``walks.py`` has every process import this module.

The environment says where: ``WALKS_FOLDER`` gets one file of calls for each process, ``WALKS_ROOT`` is the checkout, and a
call of the function ``WALKS_PAUSE`` (``file:name``) sleeps for ``WALKS_PAUSE_S`` first. No production code knows of this.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

FOLDER, ROOT, PAUSE, PAUSE_S = "WALKS_FOLDER", "WALKS_ROOT", "WALKS_PAUSE", "WALKS_PAUSE_S"
TRACED = ("services.orchestrator", "services.inference", "services.trainer", "services.common.system.forking")
NOT_TRACED = (
    "services/envgateway/__main__.py:"  # no walk enters the gateway, and untrusted programs run in its children
)
IS_FUNCTION = 0x1  # CO_OPTIMIZED: not the body of a module or a class
FLUSH_AT = 4000

_exit = os._exit


class Recorder:
    """Writes ``number file:name`` for each new function, and ``= time thread number c|r`` for each call and its end."""

    def __init__(self, folder: Path, root: str, pause: str, pause_s: float) -> None:
        self._folder = folder
        self._services = os.path.join(root, "services", "")
        self._start = len(os.path.join(root, ""))
        self._pause, self._pause_s = pause, pause_s
        self._numbers: dict[CodeType, int] = {}  # 0: not recorded
        self._count = itertools.count(1)
        self._paused = -1
        self._lines: list[str] = []

    def hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" and event != "return":
            return
        code = frame.f_code
        number = self._numbers.get(code)
        if number is None:
            number = self._learn(code)
        if not number:
            return
        if number == self._paused and event == "call":
            time.sleep(self._pause_s)
        self._lines.append(f"= {time.monotonic_ns()} {threading.get_ident()} {number} {event[0]}")
        if len(self._lines) >= FLUSH_AT:
            self.flush()

    def _learn(self, code: CodeType) -> int:
        path = code.co_filename
        known = path.startswith(self._services) and not path.endswith("_pb2_grpc.py") and code.co_flags & IS_FUNCTION
        number = next(self._count) if known else 0
        self._numbers[code] = number
        if number:
            name = f"{path[self._start :]}:{code.co_qualname}"
            if name.startswith(NOT_TRACED):
                self._stop()
                return 0
            if name == self._pause:
                self._paused = number
            self._lines.append(f"{number} {name}")
        return number

    def _stop(self) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
        self._lines.clear()
        self.flush = lambda: None  # type: ignore[method-assign]

    def flush(self) -> None:
        """Append the lines so far to the file of this process."""
        lines, self._lines = self._lines, []
        if lines:
            with (self._folder / str(os.getpid())).open("a") as file:
                file.write("\n".join(lines) + "\n")

    def begin_again(self) -> None:
        """In a forked process: a file of its own."""
        self._numbers.clear()
        self._lines.clear()


def install() -> None:
    """Record in this process and in its forks, if the process belongs to a walk."""
    if FOLDER not in os.environ or not any(argument.startswith(TRACED) for argument in sys.orig_argv):
        return
    pause = os.environ[PAUSE], float(os.environ[PAUSE_S])
    recorder = Recorder(Path(os.environ[FOLDER]), os.environ[ROOT], *pause)
    atexit.register(recorder.flush)

    def leave(code: int) -> NoReturn:
        recorder.flush()
        _exit(code)

    os._exit = leave
    os.register_at_fork(after_in_child=recorder.begin_again)
    threading.setprofile(recorder.hook)
    sys.setprofile(recorder.hook)
