"""Runs one server as a child process: free port, readiness check, explained failures, end with the parent."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.common.config.processes import InferenceConfig
from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.installing import COMPLETE, ROOT
from services.common.security.keys import without_keys
from services.common.system.child import bound_to_this_process
from services.common.system.devices import has_gpu_driver, mapped_gpus, visible_gpus
from services.common.system.machine import free_ports
from services.common.system.processes import KILLED_S, has_ended, how_ended, last_lines, output_tail, signal_group
from services.inference.engine.served.client import ServerClient

# --- Finds the interpreter, GPUs, cores and arguments of servers. Imports no heavy modules.


PORTS_TRIED = 3  # of one start: a server binds its port after loading, seconds to minutes after the port was found free
Argument = str | int | float | bool


def python_variable(engine: str) -> str:
    """The variable that names the interpreter of an engine's package.

    >>> python_variable("sglang")
    'ROLLMILL_SGLANG_PYTHON'
    """
    return f"ROLLMILL_{engine.upper()}_PYTHON"


def interpreter(
    engine: str, setting: str | None, environment: Mapping[str, str] = os.environ, *, on_cpu: bool = False
) -> str:
    """The interpreter that has the package of an engine (``sglang`` or ``vllm``): the setting, the variable, the
    environment for this device beside the sources if its install came to its end, or our own.

    ``ConfigError`` if the named interpreter does not exist.
    """
    beside = ROOT / f".venv-{engine}{'-cpu' if on_cpu else ''}"
    made = str(beside / "bin" / "python") if (beside / COMPLETE).exists() else sys.executable
    found = setting or environment.get(python_variable(engine)) or made
    if shutil.which(found) is None:
        where = f"{engine}.python" if setting else python_variable(engine)
        raise ConfigError(
            f"{where}: there is no interpreter {found}; name the one of the environment that holds {engine}"
        )
    return found


def own_gpus(config: InferenceConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of a service, in CUDA's notation; empty without a choice.

    Where the environment shows as many GPUs as the service takes, they are its own: the launcher has mapped them.
    """
    shown = visible_gpus(environment)
    if not config.gpus or (shown is not None and len(shown) == len(config.gpus)):
        return shown or []
    return mapped_gpus(config.gpus, environment, "inference.*.gpus")


def seen_device(gpu: str | int, environment: Mapping[str, str] = os.environ) -> str:
    """A GPU in torch's notation, as this process sees it: by name in CUDA's notation, or by number among the visible ones.

    >>> seen_device("5", {"CUDA_VISIBLE_DEVICES": "4,5"})
    'cuda:1'
    """
    shown = visible_gpus(environment)
    if isinstance(gpu, int) or shown is None:
        return f"cuda:{gpu}"
    return f"cuda:{shown.index(gpu)}"


def runs_on_cpu(config: InferenceConfig) -> bool:
    """Whether the device is the CPU; ``auto`` checks for a GPU's driver, without initialising a GPU."""
    if config.device != "auto":
        return config.device == "cpu"
    return not (has_gpu_driver() or shutil.which("nvidia-smi"))


def own_arguments(engine: str, extra: Mapping[str, Argument], ours: Collection[str]) -> dict[str, Argument]:
    """The recipe's arguments of a program, with underscores. ``ConfigError`` for one of ``ours``."""
    if mistaken := [key for key in extra if _plain(key) in ours]:
        raise ConfigError(
            f"{engine}.extra_arguments names {', '.join(mistaken)}, which Rollmill sets itself: remove them"
        )
    return {_plain(key): value for key, value in extra.items()}


def spelled(arguments: Mapping[str, Argument], *, negated: bool = False) -> list[str]:
    """Arguments as words of a command line; a false one is left out, or negated (``--no-x``).

    >>> spelled({"tp_size": 2, "sleep_on_idle": True, "async_scheduling": False}, negated=True)
    ['--tp-size', '2', '--sleep-on-idle', '--no-async-scheduling']
    """
    words: list[str] = []
    for key, value in arguments.items():
        option = key.replace("_", "-")
        if not isinstance(value, bool):
            words += [f"--{option}", str(value)]
        elif value or negated:
            words.append(f"--{option}" if value else f"--no-{option}")
    return words


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def hints_of(program: str, section: str, remedies: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Patterns of a server's output with remedies: the program's own first, then those of every program."""
    return [
        *remedies,
        (
            rf"No module named ['\"]?{section}",
            f"this interpreter has no {program}: run `make {section}-env` ({section}-cpu-env for CPUs), or name one that has it "
            f"with {section}.python or {python_variable(section)}",
        ),
        (
            r"unrecognized arguments?:? .*|invalid choice: .*|argument --\S+: .*",
            f"{program} does not know an argument: correct {section}.extra_arguments",
        ),
        (
            r"out of memory|OutOfMemoryError|Not enough memory|mem-fraction-static|Cannot allocate memory|"
            r"No available memory for the cache blocks|is less than desired|KV cache is needed",
            f"too little memory: raise {section}.memory_share if the GPU is free, lower it if other processes use the GPU, raise "
            f"{section}.tensor_parallel, or lower policies.<name>.model.context_length or {section}.max_running_requests",
        ),
        (
            r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA driver|Invalid GPU id",
            "no such GPU here: correct inference.<name>.gpus (`nvidia-smi -L` lists them)",
        ),
        (
            r"no file named config\.json|Incorrect path_or_model_id|Invalid repository ID|is not a local folder|"
            r"Repo id must be|Can't load the configuration|does not appear to have a file named|"
            r"Cannot find any model weights|Unrecognized model",
            f"the model path holds no model that {program} can read: correct policies.<name>.model.path",
        ),
        (r"[Aa]ddress already in use", f"ports were taken meanwhile, {PORTS_TRIED} times in a row"),
    ]


log = structlog.get_logger(__name__)
READY_POLL_S = 0.5
_NEIGHBOURS = 16  # servers that may start at the same moment in this process
_starts = itertools.count()
LEFTOVERS_POLL_S, LEFTOVERS_POLLS = 0.05, 60  # wait for the workers' end after the server's


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server program: its last arguments, its client, and the meaning of its output."""

    name: str  # as in messages
    section: str  # of its settings in a recipe
    connect: Callable[[str, str], ServerClient]  # of an address and a key
    arguments: Callable[[int, int, Path], Sequence[str]]  # of a port, the version of the initial weights, and a file
    """The file has the line ``api-key: KEY``, and is removed when the server is ready."""
    hints: Sequence[tuple[str, str]]  # a pattern of the line with the cause, and a remedy
    port_taken: re.Pattern[str]  # in the output, if another process listens on the port


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The command of one server; ``argv`` lacks the arguments that each start chooses."""

    name: str
    argv: tuple[str, ...]
    program: Program
    env: Mapping[str, str] = field(default_factory=dict)


class _PortTakenError(InfrastructureError):
    """Another process listens on the server's port."""


class ServerProcess:
    """Starts a server and returns its client; a failure names its cause.

    Each start has a key of its own. Without the key the server refuses all calls but a health check: other users of the
    machine reach its port, and some of its routes unpickle request bodies.
    """

    def __init__(self, command: ServerCommand, log_path: Path, ready_timeout_s: float) -> None:
        self.name = command.name
        self.program = command.program
        self.log_path = log_path
        self._command = command
        self._ready_timeout_s = ready_timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._log_start = 0  # of this start, in the log

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self, version: int) -> ServerClient:
        """Start and wait until the server answers. Call in the main thread: the kernel ends the child when that thread ends.

        Raises:
            InfrastructureError: the server died while loading; the message has its last lines and a remedy.
            DeadlineError: the server did not answer in time.
        """
        key = secrets.token_hex(32)  # a program takes one that begins with "-" for an option
        # Its owner alone may read the file: a key must not be on a command line or in a log.
        with tempfile.NamedTemporaryFile("w", prefix="rollmill-server-", suffix=".yaml") as key_file:
            key_file.write(f"api-key: {key}\n")
            key_file.flush()
            for _ in range(PORTS_TRIED - 1):
                try:
                    return await self._start(version, key, Path(key_file.name))
                except _PortTakenError:
                    log.warning("engine_server.port_taken", server=self.name)
            return await self._start(version, key, Path(key_file.name))

    async def _start(self, version: int, key: str, key_file: Path) -> ServerClient:
        port = free_ports(1 + next(_starts) % _NEIGHBOURS)[-1]
        argv = [*self._command.argv, *self.program.arguments(port, version, key_file)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._child = await asyncio.create_subprocess_exec(
                *bound_to_this_process(argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**without_keys(os.environ), **self._command.env},
                start_new_session=True,  # the workers are in its group and end with the group
            )
        log.info("engine_server.started", server=self.name, pid=self._child.pid, port=port, log=str(self.log_path))
        client = self.program.connect(f"http://127.0.0.1:{port}", key)
        try:
            await self._until_ready(client)
        except BaseException:
            await client.close()
            await self.stop()
            raise
        return client

    async def ended(self) -> str:
        """Wait without a limit for the process's end; returns the exit status and the last output."""
        assert self._child is not None
        return self._exit_message(await self._child.wait(), "")

    def kill(self) -> None:
        """Kill the server and its workers at once."""
        if self._child is not None:
            signal_group(self._child)

    async def stop(self) -> None:
        """Kill the server and its workers.

        The cleanup of their semaphores is given a moment. SIGTERM is not used: the server has no state to save and would
        wait five seconds.
        """
        child = self._child
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        await has_ended(child, KILLED_S)
        for _ in range(LEFTOVERS_POLLS):
            if not signal_group(child, 0):
                return
            await asyncio.sleep(LEFTOVERS_POLL_S)
        if signal_group(child):
            log.warning("engine_server.killed_workers", server=self.name)

    async def _until_ready(self, client: ServerClient) -> None:
        assert self._child is not None
        deadline = asyncio.get_running_loop().time() + self._ready_timeout_s
        while not await client.is_ready():
            if self._child.returncode is not None:
                raise InfrastructureError(self._exit_message(self._child.returncode, " while loading"))
            if self.program.port_taken.search(self._output()):
                # The server would poll the port's owner for two minutes.
                raise _PortTakenError(
                    f"the {self.program.name} server {self.name} found its port taken\n{self._last_lines()}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineError(
                    f"the {self.program.name} server {self.name} did not answer within {self._ready_timeout_s:g} s"
                    f"\n{self._last_lines()}",
                    wait=self.name,
                )
            await asyncio.sleep(READY_POLL_S)

    def _exit_message(self, code: int, when: str) -> str:
        return f"the {self.program.name} server {self.name} {how_ended(code)}{when}{_explained(self._output(), self.program.hints)}\n{self._last_lines()}"

    def _last_lines(self) -> str:
        return last_lines(self.log_path, self._log_start)

    def _output(self) -> str:
        """The end of this start's output."""
        return output_tail(self.log_path, self._log_start)


def _explained(output: str, hints: Sequence[tuple[str, str]]) -> str:
    """The line with the cause, and a remedy; empty if no hint matches."""
    lines = output.splitlines()
    for pattern, hint in hints:
        found = next((line.strip() for line in reversed(lines) if re.search(pattern, line)), None)
        if found is not None:
            return f": {hint}\n  {found[-400:]}"
    return ""
