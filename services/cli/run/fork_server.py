"""The launcher's side of ``services.common.system.forking``: trainers and replicas on a CPU start without importing torch anew.

Importing torch and the model library costs a process five seconds of a core, at every restart; the other services cost one,
and are forked when they are started again. Where the server cannot be had, processes are started as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common.system.child import module_command, module_in
from services.common.system.children import AnsweringChild, ChildLostError

log = structlog.get_logger()

READY_S = 120.0  # importing, on cores that other starting processes share
ANSWER_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36

MODULES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "services.trainer.app",
    "services.trainer.checkpoint.export",
    "services.trainer.loop.grpc_link",
    "services.trainer.loop.training_loop",
    "services.trainer.publish.snapshot",
    "services.trainer.setup",
    "services.trainer.step.supervised",
    "services.trainer.warm_start",
    "services.inference.app",
    "services.inference.engine.torch.engine",
    "services.inference.weights.fetcher",
    "services.inference.weights.relay",
    "services.inference.weights.updater",
    "services.orchestrator.app",
    "services.envgateway.app",
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
