"""A bad input: a request, its right verdicts, and further conditions on the answer.

Every hostile program bounds its own time, processes and bytes as well: the program may run without a sandbox.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.config.envgateway import SandboxConfig
from services.envgateway.judge.records import (
    CaseResult,
    Comparison,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
    Tests,
)
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits

OK, WA, RE, CE = RunStatus.OK, RunStatus.WRONG_ANSWER, RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR
TL, ML, OL, IR = RunStatus.TIME_LIMIT, RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT, RunStatus.INVALID_REQUEST

OUTPUT_CAP = 20_000
CONFIG = SandboxConfig(
    num_slots=2,
    wall_time_s=30.0,
    cpu_time_s=10.0,
    memory_bytes=192 << 20,
    num_processes=8,
    output_bytes=OUTPUT_CAP,
    file_bytes=1 << 20,
    disk_bytes=4 << 20,
    prewarm_scientific=False,
)
CANARY = "planted-" + "canary"  # in the judge's environment, in a file, in its memory; no program may print it


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Facts about the machine that a program gets."""

    judge_pid: int
    tcp_port: int
    udp_port: int
    canary_file: Path

    def fill(self, code: str) -> str:
        return (
            code.replace("JUDGE_PID", str(self.judge_pid))
            .replace("TCP_PORT", str(self.tcp_port))
            .replace("UDP_PORT", str(self.udp_port))
            .replace("CANARY_INCLUDE", f'"{self.canary_file}"')
            .replace("CANARY_FILE", repr(str(self.canary_file)))
            .replace("PACKAGE_FILE", repr(os.__file__))
        )


@contextmanager
def open_world() -> Iterator[World]:
    """Sockets, a readable secret in a file, the same in our environment; the file must survive, and no socket be reached."""
    # not below a test's own directory, which is closed: only the sandbox may keep programs from this file
    canary_file = Path(f"/var/tmp/rollmill-{os.getpid()}-canary")
    canary_file.write_text(CANARY)
    canary_file.chmod(0o644)
    os.environ["CANARY"] = CANARY
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
        ):
            udp.bind(("127.0.0.1", 0))
            abstract.bind(f"\0rollmill-{os.getpid()}")
            named.bind(f"{canary_file}-socket")
            os.chmod(f"{canary_file}-socket", 0o777)
            yield World(
                judge_pid=os.getpid(),
                tcp_port=tcp.getsockname()[1],
                udp_port=udp.getsockname()[1],
                canary_file=canary_file,
            )
            for reached in (udp, abstract, named):
                reached.setblocking(False)
                with suppress(BlockingIOError):
                    raise AssertionError(f"a program has sent {reached.recv(99)!r}")
        assert canary_file.read_text() == CANARY
    finally:
        del os.environ["CANARY"]
        for path in canary_file.parent.glob(f"{canary_file.name}*"):
            path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One bad input. ``number`` is its row of the table."""

    number: int
    name: str
    request: JudgeRequest
    verdicts: frozenset[RunStatus]
    check: Callable[[JudgeResult], bool] | None = None

    def __str__(self) -> str:
        return f"{self.number}-{self.name}"

    def request_in(self, world: World) -> JudgeRequest:
        return replace(self.request, code=world.fill(self.request.code))

    def wrong(self, result: JudgeResult) -> str:
        """Violated conditions; empty when all hold."""
        said = [(c.verdict.value, c.detail, c.stdout[-200:], c.stderr[-200:], c.wall_s, c.cpu_s) for c in result.cases]
        if result.verdict not in self.verdicts:
            return f"{self}: {result.verdict.value} ({result.detail}) is none of {sorted(self.verdicts)}: {said}"
        if self.check is not None and not self.check(result):
            return f"{self}: the answer is not as it must be: {said}"
        return f"{self}: the canary was seen" if CANARY in repr(result) else ""


def bad(
    number: int,
    name: str,
    code: str,
    *verdicts: RunStatus,
    expected: str | None = None,
    stdin: str = "",
    tests: Tests | None = None,
    comparison: Comparison | None = None,
    check: Callable[[JudgeResult], bool] | None = None,
    language: str = "python",
    **limits: Any,
) -> Bad:
    """A bad input: a program on stdin unless tests are given."""
    request = JudgeRequest(
        code=code,
        language=language,
        tests=tests if tests is not None else StdinTests(cases=(StdinCase(stdin=stdin, expected=expected),)),
        comparison=comparison or Comparison(),
        limits=ExecutionLimits(**{"wall_s": 10.0, **limits}),
    )
    return Bad(number=number, name=name, request=request, verdicts=frozenset(verdicts), check=check)


def first(result: JudgeResult) -> CaseResult:
    return result.cases[0]


HONEST = JudgeRequest(
    code="print(sum(map(int, input().split())))", tests=StdinTests(cases=(StdinCase(stdin="20 22", expected="42"),))
)
