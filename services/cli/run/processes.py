"""Starts the processes of a run, supervises them, and stops exactly these.

Takes ``ProcessSpec``s, not recipes. Restarts a process that was killed by a signal or asks for a restart, a bounded
number of times in a row (every service resumes by itself); a process that has run well for a while starts a new count.
A process that exits with an error ends the run with its last log lines.

A process starts in one of two ways: as an interpreter of its own, or, a trainer, replica or warm start on a CPU, forked from
one process that has imported torch and the model library (``services.common.system.forking``), which costs five seconds of a
core otherwise, at every restart. Where the fork server cannot be had, processes are started as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import structlog

from services.cli.plan import ProcessSpec
from services.common import run_files
from services.common.errors import DeadlineError, InfrastructureError
from services.common.rpc.client import is_serving
from services.common.system.child import DIE_WITH_PARENT, LEFT, START_AGAIN, module_command, module_in
from services.common.system.devices import inside
from services.common.system.processes import (
    AnsweringChild,
    ChildLostError,
    ChildProcess,
    end,
    how_ended,
    last_lines,
    signal_group,
    start_logged,
)

log = structlog.get_logger()

READY_S = 120.0  # importing, on cores that other starting processes share
ANSWER_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36

MODULES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "services.trainer.app",
    "services.trainer.checkpoints",
    "services.trainer.link",
    "services.trainer.loop",
    "services.trainer.publish",
    "services.trainer.warm_start",
    "services.inference.app",
    "services.inference.engine.torch.engine",
    "services.inference.weights.fetch",
    "services.inference.weights.updater",
)


class Adopted:
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # not adopted yet
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """One server process; starts with this object, and answers once its imports are done."""

    def __init__(
        self, log_file: Path, modules: Sequence[str] = MODULES, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Import ``modules``; ``variables`` are added to the environment of the server and its forks."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with log_file.open("ab") as output:
            self._child = AnsweringChild(
                "the fork server",
                module_command("services.common.system.forking", *modules),
                stderr=output,
                variables={
                    "TOKENIZERS_PARALLELISM": "false",
                    "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
                    **variables,
                },
                own_group=True,
            )
        self._ready = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> Adopted | None:
        """Start a command line of ``module_command``; None where the server cannot, and is given up."""
        if self._child.poll() is not None:
            return None
        module, arguments = module_in(argv)
        question = {
            "module": module, "arguments": arguments, "environment": dict(environment), "output": str(output),
            "parent": os.getpid(),
        }  # fmt: skip
        try:
            if not self._ready:
                self._child.ask("the fork server's imports", READY_S)
                self._ready = True
            return Adopted(int(self._child.ask("the fork server's answer", ANSWER_S, question)["pid"]))
        except ChildLostError as error:
            log.warning("fork_server.lost", error=error.message)
            self.stop()
            return None

    def stop(self) -> None:
        self._child.kill()  # and the process it was about to start, whose pid is not known
        self._child.close()


def reap_orphans(known: set[int]) -> None:
    """Wait for ended children that this process has not started: descendants of processes that died before them."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return  # waitid reports one of ours first; the others follow the next time
        os.waitpid(found.si_pid, 0)


WATCH_S = 0.1  # between two looks at whether a process has ended
# No process, memory or disk to be had at this moment.
_FOR_NOW = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
_ENDED_EARLY = (
    "exited with 0 and was neither drained nor stopped: code that it calls, such as a reward, a workflow or a tool, ended the "
    "process (os._exit): raise an exception there instead"
)
WELL_AFTER_S = 600.0  # a process that has run for so long counts as healthy


@dataclass(slots=True)
class Running:
    """A started process."""

    spec: ProcessSpec
    popen: ChildProcess
    restarts: int = 0  # in a row
    started_at: float = field(default_factory=time.monotonic)
    earlier: list[ChildProcess] = field(default_factory=list)  # that have ended and left processes in their groups


class Processes:
    """The processes of one run on this node."""

    def __init__(
        self,
        run_dir: Path,
        max_restarts: int,
        stop_grace_s: float,
        well_after_s: float = WELL_AFTER_S,
        forks: ForkServer | None = None,
    ) -> None:
        """``forks``: where specs that are ``forked`` start, now and again; the caller stops it after these processes."""
        self._logs = run_files.logs(run_dir)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._max_restarts = max_restarts
        self._stop_grace_s = stop_grace_s
        self._well_after_s = well_after_s
        self._running: dict[str, Running] = {}
        self._forks = forks

    def start(self, spec: ProcessSpec) -> None:
        self._running[spec.name] = Running(spec, self._popen(spec))

    def pids(self) -> dict[str, int]:
        return {name: process.popen.pid for name, process in self._running.items()}

    def run_to_end(self, spec: ProcessSpec, tick: Callable[[], None] = lambda: None) -> None:
        """Run one process until its exit; raises ``InfrastructureError`` with its last output unless the exit code is
        0."""
        self.start(spec)
        process = self._running[spec.name].popen
        while (code := process.poll()) is None:
            tick()
            time.sleep(WATCH_S)
        del self._running[spec.name]
        signal_group(process)
        if code != 0:
            raise InfrastructureError(f"{spec.name} {how_ended(code)}\n{self._last_lines(spec)}")

    def wait_ready(
        self,
        timeout_s: float,
        tick: Callable[[], None] = lambda: None,
        without: Collection[str] = (),
        ends_with: str = "",
    ) -> None:
        """Wait until every process but those named reports SERVING, or has exited with 0 because the run was stopped
        meanwhile.

        Once the process ``ends_with`` has exited with 0, the wait ends: the others have no work left.

        Raises ``DeadlineError`` with the names of the processes that are not ready.
        """
        deadline = time.monotonic() + timeout_s
        pending = {name: process for name, process in self._running.items() if name not in without}
        while pending:
            left = self.watch(starting=pending)
            for name in [n for n, p in pending.items() if n in left or is_serving(p.spec.address)]:
                del pending[name]
                log.info("process.left" if name in left else "process.ready", process=name)
            if ends_with in left:
                return
            if pending and time.monotonic() > deadline:
                names = ", ".join(sorted(pending))
                first = next(iter(pending.values()))
                raise DeadlineError(
                    f"{names} not ready after {timeout_s:g} s (launch.ready_timeout_s)\n{self._last_lines(first.spec)}"
                )
            tick()
            time.sleep(WATCH_S)

    def watch(self, starting: Collection[str] = ()) -> set[str]:
        """Restart processes that a signal killed or that ask for a restart (``START_AGAIN``); return the names that
        left: exited with 0, and a replica with ``LEFT``.

        Processes that are ``starting`` for the first time are restarted only when they were killed: an error at the
        start is reported at once.

        Raises ``InfrastructureError`` with the last log lines of a process that exited with an error or died too often.
        """
        finished = set()
        if self._forks is not None:
            reap_orphans({self._forks.pid, *self.pids().values()})
        for name, process in self._running.items():
            code = process.popen.poll()
            if code is None:
                continue
            if time.monotonic() - process.started_at > self._well_after_s:
                process.restarts = 0
            ended_early = code == 0 and process.spec.name.startswith("inference-")  # not by its own end
            mends = code < 0 or ended_early or (code == START_AGAIN and name not in starting)
            why = _ENDED_EARLY if ended_early else how_ended(code)
            if code in (0, LEFT) and not ended_early:
                finished.add(name)
            elif mends and process.restarts < self._max_restarts:
                self._start_again(process, why)
            else:
                raise InfrastructureError(f"{name} {why}\n{self._last_lines(process.spec)}")
        return finished

    def bring_back(self, names: Iterable[str]) -> None:
        """Restart a needed process that has exited with 0, ended by a person or by a guard of the machine's memory.

        Raises ``InfrastructureError`` for one that was restarted too often.
        """
        for name in names:
            process = self._running[name]
            if process.restarts >= self._max_restarts:
                raise InfrastructureError(f"{name} {how_ended(0)}\n{self._last_lines(process.spec)}")
            self._start_again(process, "it left while the run goes on")

    def _start_again(self, process: Running, why: str) -> None:
        # They may hold its port, memory or GPU. Some have work left, such as the last rows for a tracker: `stop` kills them.
        process.earlier = [one for one in {*process.earlier, process.popen} if signal_group(one, signal.SIGTERM)]
        try:
            process.popen = self._popen(process.spec)
        except OSError as error:
            if error.errno not in _FOR_NOW:
                raise
            log.warning("process.not_restarted", process=process.spec.name, why=why, error=str(error), retry_s=WATCH_S)
            return  # the next look tries again
        process.restarts += 1
        process.started_at = time.monotonic()
        log.warning("process.restarted", process=process.spec.name, why=why, restart=process.restarts)

    def stop(self, at_once: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """SIGTERM to all, wait for the grace or until ``at_once``, SIGKILL to the process groups of those that stay.

        Returns the pids of those that were killed, by name.
        """
        for process in self._running.values():
            process.popen.terminate()
        deadline = time.monotonic() + self._stop_grace_s
        while True:
            killed = {name: one.popen.pid for name, one in self._running.items() if one.popen.poll() is None}
            if not killed or time.monotonic() >= deadline or at_once():
                break
            time.sleep(WATCH_S)
        for name, process in self._running.items():
            if not end(process.popen, own_group=True):
                log.warning("process.killed", process=name, grace_s=self._stop_grace_s)
            for earlier in process.earlier:
                signal_group(earlier)
        self._running.clear()
        return killed

    def _popen(self, spec: ProcessSpec) -> ChildProcess:
        environment = {**inside(os.environ, spec.env, spec.name), DIE_WITH_PARENT: str(os.getpid())}
        output = self._logs / f"{spec.name}.stderr"
        if self._forks is not None and spec.forked:
            forked = self._forks.start(spec.argv, environment, output)
            if forked is not None:
                log.info("process.started", process=spec.name, pid=forked.pid, forked=True)
                return forked
        # In a group of its own: a Ctrl-C on the terminal is ours to pass on, in order.
        process = start_logged(spec.argv, output, environment, own_group=True)
        log.info("process.started", process=spec.name, pid=process.pid)
        return process

    def _last_lines(self, spec: ProcessSpec) -> str:
        return last_lines(self._logs / f"{spec.name}.stderr")


def children_cpu_seconds() -> float:
    """User and system seconds of this process and of all reaped children."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
