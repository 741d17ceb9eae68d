"""Requests and results of the judge. ``services.envgateway.queue`` has their form as bytes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from services.common.text.asserted_calls import AssertedCall, asserted_calls
from services.envgateway.sandbox.bare.harness import FRAME, framed
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionResult


class ComparisonMode(enum.StrEnum):
    """Rule that compares an answer with the expected one; ``services.envgateway.judge.compare`` has the rules."""

    EXACT = "exact"  # byte for byte
    STRIPPED = "stripped"  # without white space at both ends of the whole
    LINES = "lines"  # line by line, without blanks around lines and blank lines; numbers in any form
    TOKENS = "tokens"  # white-space separated words
    FLOAT = "float"  # words; those that are numbers within a tolerance
    UNORDERED_LINES = "unordered_lines"  # lines as a multiset
    UNORDERED_TOKENS = "unordered_tokens"  # words as a multiset
    JSON = "json"  # both are JSON and equal as such
    LITERAL = "literal"  # both are Python literals and equal as such
    VALUE = "value"  # returned values, as Python's == on plain data
    VALUE_UNORDERED = "value_unordered"  # the same, the outermost list as a multiset
    VALUE_FLOAT = "value_float"  # the same, numbers within a tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rule of a comparison; None takes ``LINES`` for programs and ``VALUE`` for calls. NaN never equals any value.

    >>> Comparison(mode=ComparisonMode.FLOAT, tolerance=1e-4).mode
    <ComparisonMode.FLOAT: 'float'>
    """

    mode: ComparisonMode | None = None
    tolerance: float = 1e-6  # relative or absolute, the wider of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """One input of a program; without ``expected`` the program only has to end with exit code 0."""

    stdin: str = ""
    expected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTests:
    """The program reads stdin and writes stdout."""

    cases: tuple[StdinCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """One call: plain data (None, bool, int, float, str, bytes, list, tuple, set, dict)."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    also: tuple[Any, ...] = ()  # other values that are right as well


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """``entry_point`` is a function (``add``) or a method of a fresh object (``Solution().twoSum``).

    >>> CallTests(entry_point="add", cases=(CallCase(args=(1, 2), expected=3),)).cases[0].expected
    3
    """

    entry_point: str
    cases: tuple[CallCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTests:
    """Test code: bare asserts, or a ``check(candidate)`` that the tests call, or leave to be called.

    Tests that can be read as calls and values (``services.common.text.asserted_calls``) never enter the program's
    process. Other tests run there, and their verdict is ``opaque``. ``preamble`` is code that the tests may use, such as
    the task's own prompt. Only the entry point and ``names`` are the program's (``services.common.text.programs``).
    """

    tests: str
    entry_point: str = ""  # the object that ``candidate`` names; read from the tests where they define one
    preamble: str = ""
    names: tuple[str, ...] = ()  # further names that the program defines and the tests use

    def calls(self) -> tuple[AssertedCall, ...] | None:
        """The tests as calls, or None for opaque tests. Raises ``UnusableTestsError``."""
        return asserted_calls(self.tests, self.entry_point, self.preamble, self.names)


Tests: TypeAlias = StdinTests | CallTests | AssertTests


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """One program and its tests. Limits are per case; ``stop_early`` ends at the first case that is not OK.

    >>> tests = StdinTests(cases=(StdinCase(stdin="1 2", expected="3"),))
    >>> JudgeRequest(code="print(sum(map(int, input().split())))", tests=tests).language
    'python'
    """

    code: str
    tests: Tests
    language: str = "python"  # or "cpp"
    comparison: Comparison = field(default_factory=Comparison)
    limits: ExecutionLimits = field(default_factory=ExecutionLimits)
    stop_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one case. Output is cut to a length for people; ``truncated`` is set then."""

    index: int
    verdict: RunStatus
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    exit_code: int | None = None
    signal: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResult:
    """``verdict`` is OK when every case is, else that of the first case that is not.

    With ``stop_early`` the cases after the first failure are missing; otherwise every case is there. Those after the one in
    which ``sandbox.judging_time_s`` was over are TIME_LIMIT, and were not run.
    """

    verdict: RunStatus
    cases: tuple[CaseResult, ...] = ()
    num_cases: int = 0  # asked for; more than len(cases) after an early stop
    tier: str = ""
    detail: str = ""
    opaque: bool = False  # test code ran in the program's process: the program can forge this verdict

    @property
    def num_passed(self) -> int:
        return sum(case.verdict is RunStatus.OK for case in self.cases)


# --- Converts the sandbox's results to verdicts of cases and of whole requests.


_SHOWN_BYTES = 2000
_SHOWN_LINE = 300
_FAILED = (RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)


def case_result(index: int, run: ExecutionResult, verdict: RunStatus | None = None, detail: str = "") -> CaseResult:
    """A case that was one run; ``verdict`` where the judge knows better than the sandbox."""
    return CaseResult(
        index=index,
        verdict=verdict if verdict is not None else run.status,
        detail=detail or run.detail or (last_line(run) if run.status in _FAILED else ""),
        stdout=run.stdout[:_SHOWN_BYTES].decode(errors="replace"),
        stderr=run.stderr[-_SHOWN_BYTES:].decode(errors="replace"),
        truncated=run.truncated,
        exit_code=run.exit_code,
        signal=run.signal,
        wall_s=run.wall_s,
        cpu_s=run.cpu_s,
        peak_memory_bytes=run.peak_memory_bytes,
    )


def last_line(run: ExecutionResult) -> str:
    """The last line of a failed program's output, which names its error."""
    if run.signal is not None:
        return f"signal {run.signal}"
    lines = run.stderr[-_SHOWN_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1][:_SHOWN_LINE] if lines else f"exit code {run.exit_code}" if run.exit_code else ""


def whole_result(cases: Sequence[CaseResult], num_cases: int, tier: str) -> JudgeResult:
    """The first failure decides, but a failure of the machinery never does where the program failed as well."""
    failed = [case for case in cases if case.verdict is not RunStatus.OK]
    about_program = [case for case in failed if case.verdict.is_about_the_program]
    first = next(iter(about_program or failed), None)
    return JudgeResult(
        verdict=first.verdict if first else RunStatus.OK,
        cases=tuple(cases),
        num_cases=num_cases,
        tier=tier,
        detail=f"case {first.index}: {first.detail}" if first else "",
    )


def one_frame(data: bytes) -> bytes | None:
    """The content of data that are one whole frame."""
    content = data[FRAME.size :]
    return content if framed(content) == data else None
