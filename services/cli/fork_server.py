"""The launcher's side of ``services.common.forking``: trainers and replicas on a CPU start without importing torch anew.

Importing torch and the model library costs a process five seconds of a core, at every restart; the other services cost one,
and are forked when they are started again. Where the server cannot be had, processes are started as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

import structlog

from services.common.process import DIE_WITH_PARENT

log = structlog.get_logger()

READY_S = 120.0  # importing, on cores that other starting processes share
ANSWER_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36

MODULES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "services.trainer.app",
    "services.trainer.export",
    "services.trainer.link",
    "services.trainer.loop",
    "services.trainer.setup",
    "services.trainer.snapshot",
    "services.trainer.versions",
    "services.inference.app",
    "services.inference.engine.forced",
    "services.inference.weights.fetcher",
    "services.inference.weights.relay",
    "services.inference.weights.updater",
    "services.orchestrator.app",
    "services.envgateway.app",
)


class Process(Protocol):
    """What the launcher needs of a process; ``subprocess.Popen`` is one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


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
    """One server process; it is started with this object, and answers once its imports are done."""

    def __init__(
        self, log_file: Path, modules: Sequence[str] = MODULES, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """``variables``: of the environment in which the modules are imported."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.common.forking", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={
                    **os.environ,
                    DIE_WITH_PARENT: str(os.getpid()),
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
                    **variables,
                },
                start_new_session=True,
            )
        self._ready = False
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> Process | None:
        """Start ``python -m MODULE ARGUMENTS``; None where the server cannot, and is given up."""
        if self._process.poll() is not None:
            return None
        _, _, module, *arguments = argv
        question = {
            "module": module, "arguments": arguments, "environment": dict(environment), "output": str(output),
            "parent": os.getpid(),
        }  # fmt: skip
        try:
            if not self._ready:
                self._read(READY_S)
                self._ready = True
            self._stream(self._process.stdin).write(json.dumps(question).encode() + b"\n")
            self._stream(self._process.stdin).flush()
            return Adopted(int(json.loads(self._read(ANSWER_S))["pid"]))
        except (OSError, EOFError, TimeoutError) as error:
            log.warning("fork_server.lost", error=str(error))
            self.stop()
            return None

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # and what it was about to start: nobody knows its pid
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                self._stream(stream).close()

    def _read(self, timeout_s: float) -> bytes:
        """One line. Raises ``EOFError`` when the server has ended, ``TimeoutError`` when it is silent."""
        stream = self._stream(self._process.stdout)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the fork server has not answered for {timeout_s:g} s")
            if select.select([stream], [], [], min(left, 0.5))[0]:
                if not (read := os.read(stream.fileno(), 4096)):
                    raise EOFError("the fork server has ended")
                self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @staticmethod
    def _stream(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream


def reap_orphans(known: set[int]) -> None:
    """Clear away children that have ended and that nobody here has started: of processes that died before them."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return  # one of ours is told first; the others are looked at the next time
        os.waitpid(found.si_pid, 0)
