"""One SGLang server as a child process: started on a free port, watched, explained when it dies, and gone with us."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import signal
import tempfile
from pathlib import Path

import structlog

from services.common.errors import DeadlineError, InfrastructureError
from services.common.free_ports import free_ports
from services.common.process import bound_to_this_process
from services.common.security.bundle import without_keys
from services.inference.engine.sglang.client import SglangClient
from services.inference.engine.sglang.command import ServerCommand

log = structlog.get_logger(__name__)

READY_POLL_S = 0.5
PORTS_TRIED = 3  # of one start: a server binds its port when it has loaded, seconds to minutes after it was found free
_NEIGHBOURS = 16  # servers that may start at the same moment in this process
_starts = itertools.count()
LEFTOVERS_POLL_S, LEFTOVERS_POLLS = 0.05, 60  # for workers to follow their server
_LAST_LINES = 12
_TAIL_BYTES = 64 * 1024
_HINTS = (
    (
        r"No module named ['\"]?sglang",
        "this interpreter has no SGLang: name one that has with sglang.python or MILLRACE_SGLANG_PYTHON",
    ),
    (
        r"unrecognized arguments?:? .*|invalid choice: .*|argument --\S+: .*",
        "SGLang does not know an argument: correct sglang.extra_arguments",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|mem-fraction-static|Cannot allocate memory",
        "too little memory: raise sglang.memory_share if nobody else uses the GPU, lower it if somebody does, raise "
        "sglang.tensor_parallel, or lower policies.<name>.model.context_length or sglang.max_running_requests",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA driver|Invalid GPU id",
        "no such GPU here: correct inference.<name>.gpus (`nvidia-smi -L` lists them)",
    ),
    (
        r"no file named config\.json|Incorrect path_or_model_id|is not a local folder|Repo id must be|Can't load the "
        r"configuration|does not appear to have a file named|Cannot find any model weights|Unrecognized model",
        "the model path holds no model that SGLang can read: correct policies.<name>.model.path",
    ),
    (r"[Aa]ddress already in use", f"ports were taken meanwhile, {PORTS_TRIED} times in a row"),
)

_PORT_TAKEN = re.compile(r"error while attempting to bind on address .*already in use")


class _PortTakenError(InfrastructureError):
    """Somebody else listens where the server meant to."""


class ServerProcess:
    """``start`` gives a client of a server that answers, or says why there is none.

    Each start has a key of its own, without which the server refuses everything but a look at its health: other users of
    the machine reach its port, and some of its routes unpickle what they are sent.
    """

    def __init__(self, command: ServerCommand, log_path: Path, ready_timeout_s: float) -> None:
        self.name = command.name
        self.log_path = log_path
        self._command = command
        self._ready_timeout_s = ready_timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._log_start = 0  # of this start, in the log

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self, version: int) -> SglangClient:
        """Start and wait until it answers. Called in the main thread, with whose end the kernel ends the child.

        Raises:
            InfrastructureError: it died while loading; the message has its last lines and what may help.
            DeadlineError: it did not answer in time.
        """
        key = secrets.token_hex(32)  # SGLang takes one that begins with "-" for an option
        config = _private_file(f"api-key: {key}\n")
        try:
            for _ in range(PORTS_TRIED - 1):
                try:
                    return await self._start(version, key, config)
                except _PortTakenError:
                    log.warning("sglang.port_taken", server=self.name)
            return await self._start(version, key, config)
        finally:
            config.unlink()

    async def _start(self, version: int, key: str, config: Path) -> SglangClient:
        port = free_ports(1 + next(_starts) % _NEIGHBOURS)[-1]
        argv = [*self._command.argv, "--port", str(port), "--weight-version", str(version), "--config", str(config)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._child = await asyncio.create_subprocess_exec(
                *bound_to_this_process(argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**without_keys(os.environ), **self._command.env},
                start_new_session=True,  # its workers are in its group, to be ended with it
            )
        log.info("sglang.started", server=self.name, pid=self._child.pid, port=port, log=str(self.log_path))
        client = SglangClient(f"http://127.0.0.1:{port}", key)
        try:
            await self._until_ready(client)
        except BaseException:
            await client.close()
            await self.stop()
            raise
        return client

    async def ended(self) -> str:
        """Wait for its end, whenever that is; returns how and with which last words."""
        assert self._child is not None
        return self._obituary(await self._child.wait(), "")

    def kill(self) -> None:
        """At once, with everything that it started."""
        if self._child is not None and self._child.returncode is None:
            _signal_group(self._child.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End it; nothing of it is left.

        Its workers die with it, and what cleans up after them (semaphores) is given a moment. There is no state to save,
        and asked politely it waits five seconds.
        """
        child = self._child
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        await child.wait()  # SIGKILL was sent: the kernel ends it
        for _ in range(LEFTOVERS_POLLS):
            if not _signal_group(child.pid, 0):
                return
            await asyncio.sleep(LEFTOVERS_POLL_S)
        if _signal_group(child.pid, signal.SIGKILL):
            log.warning("sglang.killed_workers", server=self.name)

    async def _until_ready(self, client: SglangClient) -> None:
        assert self._child is not None
        deadline = asyncio.get_running_loop().time() + self._ready_timeout_s
        while not await client.is_ready():
            if self._child.returncode is not None:
                raise InfrastructureError(self._obituary(self._child.returncode, " while loading"))
            if _PORT_TAKEN.search(self._output()):
                # It would stay for two minutes, asking the port's owner whether it is ready.
                raise _PortTakenError(f"the SGLang server {self.name} found its port taken\n{self._last_words()}")
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineError(
                    f"the SGLang server {self.name} did not answer within {self._ready_timeout_s:g} s "
                    f"(sglang.ready_timeout_s)\n{self._last_words()}",
                    wait=self.name,
                )
            await asyncio.sleep(READY_POLL_S)

    def _obituary(self, code: int, when: str) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"the SGLang server {self.name} {how}{when}{_explained(self._output())}\n{self._last_words()}"

    def _last_words(self) -> str:
        lines = self._output().strip().splitlines()[-_LAST_LINES:]
        words = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return f"  last lines of {self.log_path}:\n{words}"

    def _output(self) -> str:
        """The end of what this start has written."""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _explained(output: str) -> str:
    """The line that says what was wrong, and what may help; nothing when no hint fits."""
    lines = output.splitlines()
    for pattern, hint in _HINTS:
        found = next((line.strip() for line in reversed(lines) if re.search(pattern, line)), None)
        if found is not None:
            return f": {hint}\n  {found[-400:]}"
    return ""


def _private_file(text: str) -> Path:
    """For what must stand neither on a command line nor in a log. Its owner alone may read it."""
    descriptor, name = tempfile.mkstemp(prefix="millrace-sglang-", suffix=".yaml")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return Path(name)


def _signal_group(pid: int, how: int) -> bool:
    """Whether anybody of the group was there."""
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        return False
    return True
