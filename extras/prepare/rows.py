"""Writes the usable rows of several inputs into one jsonl file of one form.

``process_train_dataset`` is rStar2's, for math problems of either column layout:

    {"prompt": [{"role": "user", "content": ...}], "reward_model": {"ground_truth": ...}}
    {"problem": ..., "answer": ...}
                                        --> {"problem": ..., "answer": ...}

``prepare_code`` is for programming problems, whose reference solutions are judged.

Rows that cannot be used are left out, counted and named; a file without a usable row is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from services.cli.check.data import SolutionReport, judge_solutions
from services.common.config.data import DatasetConfig
from services.common.config.envgateway import SandboxConfig
from services.common.errors import DatasetError
from services.orchestrator.tasks.datasets import open_source, why_tests_are_unusable
from services.orchestrator.tasks.rows import SkippedRows


@dataclass(slots=True)
class Prepared:
    """Counts of the written file."""

    num_rows: int = 0
    left_out: dict[str, SkippedRows] = field(default_factory=dict)  # rows that cannot be used, by input
    solutions: dict[str, SolutionReport] = field(default_factory=dict)  # of programming problems, by input


def process_train_dataset(inputs: Sequence[str], output: Path, subset: str | None = None) -> Prepared:
    """Read jsonl or parquet files, saved datasets or hub names (of these the ``subset``), and write all rows into one jsonl
    file.

    Raises:
        DatasetError: an input is unreadable, or has no usable row.
    """
    if subset and all(Path(name).is_file() for name in inputs):
        raise DatasetError(f"--subset {subset} chooses a configuration of a hub dataset, and every input is a file")
    done = Prepared()
    with _written(output) as keep:
        for name in inputs:
            source = open_source(DatasetConfig(path=name, form="math", subset=subset), seed=0)
            done.left_out[name] = source.left_out
            for place in range(len(source)):
                row = source[place].data
                keep({"problem": row["problem"], "answer": row["answer"]})
            done.num_rows += len(source)
    return done


def prepare_code(inputs: Sequence[str], output: Path, sandbox: SandboxConfig, case_time_s: float | None) -> Prepared:
    """Write the programming problems that have usable tests. A problem whose own solution fails the tests is left out.

    Raises:
        DatasetError: an input cannot be read, or has no usable row.
    """

    def required(row: Mapping[str, Any], where: str) -> None:
        if why := why_tests_are_unusable(row["tests"]):
            raise DatasetError(f"{where}: {why}")

    done = Prepared()
    with _written(output) as keep:
        for name in inputs:
            source = open_source(DatasetConfig(path=name, form="code"), seed=0, required=required)
            done.left_out[name] = source.left_out
            tasks = (source[place] for place in range(len(source)))
            rows = ((f"row {task.task_id}", task.data) for task in tasks)
            report = done.solutions[name] = asyncio.run(judge_solutions(rows, sandbox, case_time_s, keep))
            done.num_rows += report.num_passed + report.num_without
    return done


@contextlib.contextmanager
def _written(output: Path) -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Yields a function that adds a row; the file appears under its name only when complete."""
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            yield lambda row: file.write(orjson.dumps(row) + b"\n")
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
