"""What is asked of the sandbox and what it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeVar

from services.common.config.envgateway import SandboxConfig

OPEN_FILES = 64

Number = TypeVar("Number", int, float)


class ExecutionStatus(enum.StrEnum):
    """How an execution ended. Only INFRA_ERROR says nothing about the program: retry it."""

    OK = "OK"  # exit code 0
    RUNTIME_ERROR = "RUNTIME_ERROR"  # another exit code, or a signal
    TIME_LIMIT = "TIME_LIMIT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    INVALID_REQUEST = "INVALID_REQUEST"
    CANCELLED = "CANCELLED"
    INFRA_ERROR = "INFRA_ERROR"


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
        """Complete limits, cut to what the config allows, as the supervisor reads them."""
        return {
            "wall_s": _at_most(self.wall_s, config.wall_time_s),
            "cpu_s": _at_most(self.cpu_s, config.cpu_time_s),
            "memory_bytes": _at_most(self.memory_bytes, config.memory_bytes),
            "processes": _at_most(self.processes, config.num_processes),
            "output_bytes": _at_most(self.output_bytes, config.output_bytes),
            "file_bytes": config.file_bytes,
            "open_files": OPEN_FILES,
        }


def _at_most(asked: Number | None, largest: Number) -> Number:
    return largest if asked is None else min(asked, largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRequest:
    """One Python program.

    >>> ExecutionRequest(code="print(47*38)").stdin
    b''
    """

    code: str
    stdin: bytes = b""
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    echo: bool = False  # also print the value of a trailing expression, as a notebook does


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """What the supervisor saw. ``wall_s``, ``cpu_s`` and memory are its measurements, over the whole tree."""

    status: ExecutionStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    tier: str = ""
    detail: str = ""  # for people: which limit, or what broke
