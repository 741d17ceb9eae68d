"""Invariant 8: any process may die at any moment, and the run goes on, or resumes after a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config.loading import load_resolved
from tests.e2e.conftest import RUN_TIMEOUT_S, Run
from tests.waiting import WAIT_S

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
    run = start_run("survives", "run.steps=13", "policies.model0.batch.late=drop")
    run.wait_for(lambda: run.steps() >= 1, "the first training step")
    killed = [(process, signal.SIGKILL) for process in ("trainer-model0", "orchestrator", "inference-a")]
    for process, how in [*killed, ("envgateway", signal.SIGTERM)]:
        steps = run.steps()
        run.kill(process, how)
        run.wait_for(lambda before=steps: run.steps() >= before + 1, f"steps after {process} got {how.name}")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.process.wait(60) == 130
    assert f"interrupted; go on with it: rollmill run --resume {run.directory}" in " ".join(run.output.split())
    done = run.steps()
    result = resumed(run, rollmill)
    assert run.steps() == 13 > done >= 5
    assert result["max_staleness"] <= 1
    assert_each_slot_has_one_record(run)


def resumed(run: Run, rollmill: Callable[..., tuple[int, str]]) -> dict[str, Any]:
    """The object on the last line of the output of a successful ``rollmill run --resume``."""
    code, output = rollmill("run", "--resume", run.directory, "--json")
    assert code == 0, output
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


# --- launched again with --resume auto


def run_directories(runs: Path) -> list[Path]:
    return sorted(resolved.parent for resolved in runs.glob("*/recipe.json"))


def listening_at(port: int) -> socket.socket:
    """Another program's listener at a port that the processes of a killed launcher leave soon."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is still in use"
            time.sleep(0.05)


def test_the_run_of_a_launcher_that_was_killed_goes_on_once(start_run: Callable[..., Run], tmp_path: Path) -> None:
    first = start_run("first", "run.steps=4", resume="auto")
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not any(b'"training_step"' in file.read_bytes() for file in tmp_path.glob("*/metrics/orchestrator.jsonl")):
        assert first.process.poll() is None and time.monotonic() < deadline, first.output
        time.sleep(0.1)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(WAIT_S)
    assert "beginning a new run" in first.output
    (run_dir,) = run_directories(tmp_path)

    port = load_resolved(run_dir).orchestrator.port
    with listening_at(port):
        both = [start_run(name, "run.steps=4", resume="auto") for name in ("second", "third")]
        codes = [each.process.wait(RUN_TIMEOUT_S) for each in both]
    assert sorted(codes) == [0, 2], "\n".join(each.output for each in both)
    winner, loser = sorted(both, key=lambda each: each.process.wait(0))
    assert f"going on with {run_dir}" in winner.output
    assert f"orchestrator.port: another program has taken port {port}" in winner.output
    assert "is in use" in loser.output or "cannot continue" in loser.output
    assert run_directories(tmp_path) == [run_dir]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", {"model0": 4})
