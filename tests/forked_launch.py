"""``rollmill`` in a process whose imports are done: ``python -m tests.forked_launch ARGUMENTS``, forked by ``tests.forks``.

The own fork server of ``rollmill run`` is forked here too, before any thread starts, instead of importing torch once more;
both save each run five CPU seconds. It forks the orchestrator and the gateway as well, which saves two.
The process leaves without tearing down the thousands of modules that it does not use.
All else is the command's code. Tests that start ``python -m services.cli run`` itself,
such as ``test_first_run``, have the import.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from services.cli import __main__ as command
from services.cli.plan import ProcessSpec
from services.cli.run import processes
from services.cli.run.processes import Adopted
from services.common.system import forking
from services.common.system.child import DIE_WITH_PARENT, module_in, run_and_leave
from services.common.system.processes import signal_group

_PR_SET_CHILD_SUBREAPER = 36


class ForkedServer:
    """A fork server that is forked from this process, with the methods of ``ForkServer``."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        questions, self._questions = os.pipe()
        answers, written = os.pipe()
        launcher = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._questions)
            os.close(answers)
            _serve(launcher, questions, written)
        os.close(questions)
        os.close(written)
        self._answers = os.fdopen(answers, "rb")
        self._answers.readline()  # it is ready

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> Adopted:
        module, arguments = module_in(argv)
        question = {
            "module": module, "arguments": arguments, "environment": dict(environment), "output": str(output),
            "parent": os.getpid(),
        }  # fmt: skip
        os.write(self._questions, json.dumps(question).encode() + b"\n")
        return Adopted(int(json.loads(self._answers.readline())["pid"]))

    def stop(self) -> None:
        signal_group(Adopted(self.pid))


def _serve(launcher: int, questions: int, answers: int) -> NoReturn:
    os.setsid()
    os.environ[DIE_WITH_PARENT] = str(launcher)
    os.dup2(questions, 0)
    os.dup2(answers, 1)
    os.close(questions)
    os.close(answers)
    sys.stdin = os.fdopen(0, closefd=False)
    forking.main([])  # returns, or raises SystemExit, at the end of a forked process
    sys.exit(0)


def main() -> int:
    command.main()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "run":
        server = ForkedServer()
        processes.ForkServer = lambda log_file: server  # type: ignore[assignment,misc]
        start = processes.Processes._popen

        def fork(own: processes.Processes, spec: ProcessSpec) -> processes.ChildProcess:
            at_once = spec.name in ("orchestrator", "envgateway")
            return start(own, replace(spec, forked=True) if at_once else spec)

        processes.Processes._popen = fork  # type: ignore[method-assign]
    run_and_leave(main)
