"""Requests and results of the sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from services.common.config.envgateway import SandboxConfig
from services.envgateway.sandbox.bare.statuses import RunStatus

# Directories below the root that a shell in a sandbox may write; each is a part of its work dir.
WRITABLE = (
    "app", "build", "code", "data", "home", "input", "logs", "mnt", "opt", "oracle", "output", "project", "repo", "root", "solution",
    "src", "srv", "testbed", "tests", "tmp", "workdir", "workspace",
)  # fmt: skip

OPEN_FILES = 64
NUM_FILES = 1024  # files and directories of one program
ANSWER_BYTES = 8 << 20  # of a returned value, and of a program with a longer expected output than usual

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionLimits:
    """Limits of one program with all its children; None takes the gateway's value, which is also the largest.

    >>> ExecutionLimits(wall_s=1.0).wall_s
    1.0
    """

    wall_s: float | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    output_bytes: int | None = None  # of each of stdout and stderr

    def within(self, config: SandboxConfig) -> dict[str, float | int]:
        """Complete limits, cut to the config's bounds, in the supervisor's form."""
        return {
            "wall_s": _at_most(self.wall_s, config.wall_time_s),
            "cpu_s": _at_most(self.cpu_s, config.cpu_time_s),
            "memory_bytes": _at_most(self.memory_bytes, config.memory_bytes),
            "processes": _at_most(self.processes, config.num_processes),
            "output_bytes": _at_most(self.output_bytes, config.output_bytes),
            "answer_bytes": ANSWER_BYTES,
            "file_bytes": config.file_bytes,
            "open_files": OPEN_FILES,
            "disk_bytes": config.disk_bytes,
            "num_files": NUM_FILES,
        }


def _at_most(asked: Number | None, largest: Number) -> Number:
    return largest if asked is None else min(asked, largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRequest:
    """One program.

    >>> ExecutionRequest(code="print(input())", stdin=b"1").language
    'python'
    """

    code: str
    stdin: bytes = b""
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    echo: bool = False  # also print the value of a trailing expression, as a notebook does
    language: str = "python"  # or "cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """Result of a run, measured by the supervisor: ``wall_s``, ``cpu_s`` and memory cover the whole tree."""

    status: RunStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    tier: str = ""
    detail: str = ""  # for people: the exceeded limit, or the failed part
    slot_s: float = 0.0  # from the program's start until its slot was empty again
    answer: bytes = b""  # of a harness: the value of a call, a compiled program
