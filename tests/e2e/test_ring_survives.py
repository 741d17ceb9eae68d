"""Invariant 8: any process may die at any moment, and the run goes on, or resumes after a restart."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

StartRun = Callable[..., Run]


def slots_recorded(run: Run) -> Counter[tuple[str, int]]:
    return Counter((r["task_group_id"], r["index"]) for r in run.records() if "task_group_id" in r and "index" in r)


def assert_each_slot_has_one_record(run: Run) -> None:
    assert max(slots_recorded(run).values()) == 1, "a slot has two durable records"


def test_a_run_finishes_though_its_processes_are_killed_and_told_to_end_and_its_launcher_is_stopped(
    start_run: StartRun, rollmill: Callable[..., tuple[int, str]]
) -> None:
    """Killed as by kill -9, asked to end as by a guard of the machine's memory, and at last
    stopped as a whole and resumed."""
    run = start_run("survives", "run.steps=20", "policies.model0.batch.late=drop")
    run.wait_for(lambda: run.steps() >= 1, "the first training step")
    killed = [(process, signal.SIGKILL) for process in ("trainer-model0", "orchestrator", "inference-a")]
    for process, how in [*killed, ("envgateway", signal.SIGTERM)]:
        steps = run.steps()
        run.kill(process, how)
        run.wait_for(lambda before=steps: run.steps() >= before + 2, f"steps after {process} got {how.name}")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.process.wait(60) == 130
    assert f"interrupted; go on with it: rollmill run --resume {run.directory}" in " ".join(run.output.split())
    done = run.steps()
    result = resumed(run, rollmill)
    assert run.steps() == 20 > done >= 9
    assert result["max_staleness"] <= 1
    assert_each_slot_has_one_record(run)


def resumed(run: Run, rollmill: Callable[..., tuple[int, str]]) -> dict[str, Any]:
    """The object on the last line of the output of a successful ``rollmill run --resume``."""
    code, output = rollmill("run", "--resume", run.directory, "--json")
    assert code == 0, output
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found
