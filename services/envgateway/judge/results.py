"""Converts the sandbox's results to verdicts of cases and of whole requests."""

from __future__ import annotations

from collections.abc import Sequence

from services.envgateway.judge.records import CaseResult, JudgeResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionResult

_SHOWN_BYTES = 2000
_SHOWN_LINE = 300
_FAILED = (RunStatus.RUNTIME_ERROR, RunStatus.COMPILE_ERROR)
RETRYABLE = (RunStatus.INFRA_ERROR,)


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


def refused(detail: str, tier: str) -> JudgeResult:
    """The result of a request that cannot be judged."""
    return JudgeResult(verdict=RunStatus.INVALID_REQUEST, detail=detail, tier=tier)


def unusable(detail: str, tier: str) -> JudgeResult:
    """The result of tests that cannot judge any program: the program gets no verdict."""
    return JudgeResult(verdict=RunStatus.INVALID_TESTS, detail=detail, tier=tier)
