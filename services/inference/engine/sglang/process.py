"""One SGLang server as a child process: started on a free port, watched, explained when it dies, and gone with us."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import structlog

from services.common.errors import DeadlineError, InfrastructureError
from services.common.process import bound_to_this_process
from services.inference.engine.sglang.client import SglangClient
from services.inference.engine.sglang.command import ServerCommand

log = structlog.get_logger(__name__)

READY_POLL_S = 0.5
STOP_GRACE_S = 10.0
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
        "too little memory: lower policies.<name>.model.context_length or sglang.max_running_requests, raise "
        "sglang.tensor_parallel, or leave the GPU to this engine alone (sglang.memory_share is its share)",
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
    (r"[Aa]ddress already in use", "a port was taken meanwhile; it is tried again on another"),
)


class ServerProcess:
    """``start`` gives a client of a server that answers, or says why there is none."""

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
        port = _free_port()
        argv = [*self._command.argv, "--port", str(port), "--weight-version", str(version)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._child = await asyncio.create_subprocess_exec(
                *bound_to_this_process(argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._command.env},
                start_new_session=True,  # its workers are in its group, to be ended with it
            )
        log.info("sglang.started", server=self.name, pid=self._child.pid, port=port, log=str(self.log_path))
        client = SglangClient(f"http://127.0.0.1:{port}")
        try:
            await self._until_ready(client)
        except BaseException:
            await client.close()
            await self.stop(grace_s=0.0)
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

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, a grace, SIGKILL to the group; nothing of it is left."""
        child = self._child
        if child is None:
            return
        if child.returncode is None and grace_s > 0:
            _signal_group(child.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await child.wait()
            except TimeoutError:
                log.warning("sglang.killed", server=self.name, grace_s=grace_s)
        _signal_group(child.pid, signal.SIGKILL)  # also those that outlived it
        await child.wait()  # SIGKILL was sent: the kernel ends it

    async def _until_ready(self, client: SglangClient) -> None:
        assert self._child is not None
        deadline = asyncio.get_running_loop().time() + self._ready_timeout_s
        while not await client.is_ready():
            if self._child.returncode is not None:
                raise InfrastructureError(self._obituary(self._child.returncode, " while loading"))
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineError(
                    f"the SGLang server {self.name} did not answer within {self._ready_timeout_s:g} s "
                    f"(sglang.ready_timeout_s)\n{self._last_words()}",
                    wait=self.name,
                )
            await asyncio.sleep(READY_POLL_S)

    def _obituary(self, code: int, when: str) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        hint = next((hint for pattern, hint in _HINTS if re.search(pattern, self._output())), "")
        return f"the SGLang server {self.name} {how}{when}{f': {hint}' if hint else ''}\n{self._last_words()}"

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal_group(pid: int, how: signal.Signals) -> None:
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        pass  # nobody of the group is left
