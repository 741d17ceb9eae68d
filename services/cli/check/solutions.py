"""Runs the reference solutions of programming problems through the judge, to find rows with wrong tests.

`rollmill check --solutions N` reports on the first rows of each dataset; `rollmill data code` leaves failing rows out
of the file that it writes. Needs a sandbox on this machine. A run itself does not judge solutions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.config.data import DatasetConfig
from services.common.config.processes.envgateway import SandboxConfig
from services.common.errors import DatasetError, InfrastructureError, InvalidRequestError
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, JudgeRequest
from services.envgateway.rewards.code import read_tests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from services.orchestrator.tasks.datasets import TaskSource, open_source
from services.orchestrator.tasks.requirements import why_tests_are_unusable
from services.orchestrator.tasks.task_rows import SkippedRows

QUEUE_TIMEOUT_S = 600.0
_ATTEMPTS = 2  # of a solution that a busy machine may have made too slow


@dataclass(slots=True)
class SolutionReport:
    """The results of the reference solutions of a dataset."""

    num_passed: int = 0
    num_without: int = 0  # rows that have none
    failed: SkippedRows = field(default_factory=SkippedRows)

    def __str__(self) -> str:
        text = f"{self.num_passed} reference solutions pass their tests"
        if self.num_without:
            text += f", {self.num_without} rows have none"
        return f"{text}, {self.failed.count} fail: {self.failed}" if self.failed.count else text


async def judge_solutions(
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    sandbox: SandboxConfig,
    case_time_s: float | None = None,
    keep: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> SolutionReport:
    """Judge the solution of each row, which is named by its text; ``keep`` is called, in order, with rows to be kept.

    Raises:
        SandboxRefusedError: no program can be run here.
        InfrastructureError: the machinery failed; the named row remains unchecked.
    """
    pool = SandboxPool.start_before_threads(sandbox)
    report = SolutionReport()
    try:
        judge, waiting = Judge(pool), list[tuple[str, Mapping[str, Any], asyncio.Task[str | None]]]()
        for where, row in rows:
            waiting.append((where, row, asyncio.create_task(_fault(judge, row, case_time_s))))
            if len(waiting) >= 2 * sandbox.num_slots:
                await _take(waiting, report, keep)
        while waiting:
            await _take(waiting, report, keep)
    finally:
        await pool.close()
    return report


async def _take(
    waiting: list[tuple[str, Mapping[str, Any], asyncio.Task[str | None]]],
    report: SolutionReport,
    keep: Callable[[Mapping[str, Any]], None],
) -> None:
    where, row, task = waiting.pop(0)
    fault = await task
    if fault:
        report.failed.add(f"{where}: its reference solution does not pass its tests: {fault}")
        return
    report.num_passed += fault is not None
    report.num_without += fault is None
    keep(row)


async def _fault(judge: Judge, row: Mapping[str, Any], case_time_s: float | None) -> str | None:
    """Why the solution does not pass; empty if the solution passes, None for a row without one."""
    solution = row.get("solution")
    if not isinstance(solution, str) or not solution.strip():
        return None
    try:
        tests = read_tests(row)
    except InvalidRequestError as error:
        return error.message
    # As it is: a solution that was completed with its prompt has been so when the row was read.
    request = JudgeRequest(code=solution, tests=tests, limits=ExecutionLimits(wall_s=case_time_s), stop_early=True)
    told = ""
    for _ in range(_ATTEMPTS):
        result = await judge.judge(request, queue_timeout_s=QUEUE_TIMEOUT_S)
        if result.verdict is RunStatus.OK:
            return ""
        told = f"{result.verdict.value}, {result.detail}"
        if result.verdict in (RunStatus.INFRA_ERROR, RunStatus.CANCELLED):
            raise InfrastructureError(f"a reference solution could not be judged: {told}")
        if isinstance(tests, AssertTests) and result.verdict is RunStatus.INVALID_TESTS:
            break
    return told


def solution_lines(
    sources: Mapping[str, TaskSource], sandbox: SandboxConfig, case_time_s: float | None, most: int
) -> list[str]:
    """One line for each dataset that has tests: the results of the reference solutions of its first ``most`` rows."""
    lines = []
    for where, source in sources.items():
        tasks = [source[place] for place in range(min(most, len(source)))]
        rows = [(f"row {task.task_id}", task.data) for task in tasks if isinstance(task.data.get("tests"), Mapping)]
        if rows:
            lines.append(
                f"{where}: of {len(rows)} rows, {asyncio.run(judge_solutions(iter(rows), sandbox, case_time_s))}"
            )
    return lines


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The numbers of rows that `rollmill data code` has written and left out."""

    num_rows: int
    left_out: Mapping[str, SkippedRows]  # by input: rows that cannot be used
    solutions: Mapping[str, SolutionReport]  # by input


def prepare_code(
    inputs: Sequence[str], output: Path, sandbox: SandboxConfig, case_time_s: float | None
) -> PreparedRows:
    """Write the usable rows of all inputs in one form; the file appears under its name only when complete.

    Raises:
        DatasetError: an input cannot be read, or has no usable row.
    """
    import orjson

    def required(row: Mapping[str, Any], where: str) -> None:
        if why := why_tests_are_unusable(row["tests"]):
            raise DatasetError(f"{where}: {why}")

    left_out: dict[str, SkippedRows] = {}
    reports: dict[str, SolutionReport] = {}
    written = 0
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:

            def keep(row: Mapping[str, Any]) -> None:
                nonlocal written
                file.write(orjson.dumps(row) + b"\n")
                written += 1

            for name in inputs:
                source = open_source(DatasetConfig(path=name, form="code"), seed=0, required=required)
                left_out[name] = source.left_out
                tasks = (source[place] for place in range(len(source)))
                rows = ((f"row {task.task_id}", task.data) for task in tasks)
                reports[name] = asyncio.run(judge_solutions(rows, sandbox, case_time_s, keep))
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return PreparedRows(written, left_out, reports)
