"""Forks processes whose imports are done: ``python -m services.common.system.forking MODULE...``, started by the
launcher.

    stdin   one JSON line for each process: module, arguments, environment, file of its output, pid of the launcher
    stdout  {"ready": true} once the modules are imported, then {"pid": n} for each process

A process is forked twice, so that it becomes a child of the launcher, which reaps orphans: the end of this server ends
no other process, and exit codes reach the launcher. No code here starts a thread or opens a channel: a forked process
needs the interpreter in the state after the imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import threading
import time
from typing import Any, NoReturn

from services.common.system.child import die_with_parent_if_asked, run_and_leave

ADOPTED_WITHIN_S = 5.0


def main(modules: list[str]) -> None:
    """Serve until the end of the input."""
    die_with_parent_if_asked()
    answers = os.dup(1)
    os.dup2(2, 1)  # output of a module during its import is no answer
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    _answer(answers, {"ready": True})
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            continue
        child = os.fork()
        if child:
            _answer(answers, {"pid": child})
            os._exit(0)
        os.close(answers)  # the launcher sees the end of this server where no other process holds it
        _become(asked)


def _answer(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _become(asked: dict[str, Any]) -> NoReturn:
    """Run the module as ``python -m`` would in a process of its own; leaves at its end."""
    deadline = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != asked["parent"]:
        if time.monotonic() > deadline:
            os._exit(os.EX_TEMPFAIL)  # the launcher is gone
        time.sleep(0.001)
    os.setsid()  # only now: until the launcher knows the pid, it ends this process with the server's group
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(asked["environment"])
    if os.environ.get("PYTHONUNBUFFERED"):  # which the interpreter has read when it started
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [asked["module"], *asked["arguments"]]
    run_and_leave(lambda: _run(asked["module"]))


def _run(module: str) -> int:
    """Run a module to its end, with the end of its threads and ``atexit``; without the end of the interpreter, which would
    touch, and so copy, every page of the imported modules for two CPU seconds."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
