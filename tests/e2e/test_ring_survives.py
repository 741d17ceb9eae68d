"""Invariant 8: any process may die at any moment, and the run goes on, or resumes after a restart."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from services.cli.watch import OrchestratorClient
from services.common.system.child import module_command
from tests.e2e.conftest import Run
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
    run = start_run("survives", "run.steps=20", "policies.model0.batch.late=drop")
    run.wait_for(lambda: run.steps() >= 1, "the first training step")
    killed = [(process, signal.SIGKILL) for process in ("trainer-model0", "orchestrator", "inference-a")]
    told = [(process, signal.SIGTERM) for process in ("envgateway", "trainer-model0", "orchestrator")]
    for process, how in killed + told:
        steps = run.steps()
        run.kill(process, how)
        run.wait_for(lambda before=steps: run.steps() >= before + 2, f"steps after {process} got {how.name}")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.process.wait(60) == 130
    assert f"interrupted; go on with it: rollmill run --resume {run.directory}" in " ".join(run.output.split())
    done = run.steps()
    result = resumed(run, rollmill)
    assert run.steps() == 20 > done >= 13
    assert result["max_staleness"] <= 1
    assert_each_slot_has_one_record(run)


def resumed(run: Run, rollmill: Callable[..., tuple[int, str]]) -> dict[str, Any]:
    """The object on the last line of the output of a successful ``rollmill run --resume``."""
    code, output = rollmill("run", "--resume", run.directory, "--json")
    assert code == 0, output
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def test_a_second_replica_joins_in_mid_run_and_a_killed_one_loses_nothing(
    start_run: StartRun, forks: ForkServer, tmp_path: Path
) -> None:
    run = start_run("replicas", "run.steps=24", "launch.restarts=0")
    run.wait_for(lambda: run.steps() >= 1, "the first training step")
    # Paused while the second replica loads its model, or so small a run would be over before it is there.
    orchestrator = OrchestratorClient(run.address_of("orchestrator"))
    orchestrator.pause()
    command = module_command(
        *("services.inference", "--name", "late"),
        *("--orchestrator", run.address_of("orchestrator"), "--num-slots", "16"),
    )
    late = forks.start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "late.out")
    assert late is not None, "the fork server has ended"
    try:
        run.wait_for(lambda: any(r["replicas"] >= 2 for r in run.rows("throughput")), "the second replica's joining")
        before = run.steps()
        orchestrator.resume()
        run.wait_for(
            lambda: any(r.get("replica_id") == "late" for r in run.records()), "a trajectory of the second replica"
        )
        os.kill(late.pid, signal.SIGKILL)
        late.wait(WAIT_S)
        run.finish()
    finally:
        orchestrator.close()
        late.terminate()
        late.wait(WAIT_S)
    assert run.steps() == 24 > before
    expired = sum(row["sequences_expired"] for row in run.rows("training_step"))
    assert expired == 0, "what a lost replica held up is trained late"
    assert_each_slot_has_one_record(run)
    failures = [r for r in run.records() if r.get("reason") and "index" in r]
    assert not failures, "slots of the killed replica were re-issued, not given up"
