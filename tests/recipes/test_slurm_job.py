"""A job of ``rollmill deploy --target slurm`` at a scheduler that really starts the processes: it trains, a replica joins
and leaves, a node is lost, and the requeued job goes on with its run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from extras.deploy.command import write_deployment as deploy
from services.cli.plan import address_of_node_0
from tests import needs
from tests.ports import free_port
from tests.stub_slurm import StubSlurm
from tests.waiting import wait_until

pytestmark = pytest.mark.recipes

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200.0
SMALL = [
    "warm_start.model0.steps=12",
    "warm_start.model0.batch_size=64",
    "policies.model0.batch.size=32",
    "policies.model0.batch.dynamic_sampling=false",
    "policies.model0.trainer.checkpoint_every=2",
    "data.evaluation.held_out.limit=16",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "run.until=null",
    "run.steps=100000",
    "orchestrator.lease_s=3",
    "inference.a.node=1",
]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[StubSlurm]:
    needs.check("an address beside loopback")
    made = StubSlurm(tmp_path / "slurm", address_of_node_0({}))
    yield made
    made.end()


def test_a_job_trains_takes_a_replica_more_and_goes_on_after_a_node_is_lost(
    scheduler: StubSlurm, tmp_path: Path
) -> None:
    places = ("orchestrator", "envgateway", "inference.a", "policies.model0.trainer", "policies.model0.weights")
    ports = [f"{place}.port={free_port()}" for place in places]
    deploy(ROOT / "recipes" / "quickstart", "slurm", tmp_path / "out", [*SMALL, *ports])
    run_dir = tmp_path / "runs" / "mine"
    variables = {"PYTHON": sys.executable, "RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}

    def steps() -> int:
        rows = run_dir / "metrics" / "orchestrator.jsonl"
        lines = rows.read_bytes().splitlines() if rows.exists() else []
        found = [orjson.loads(line) for line in lines if line.endswith(b"}")]
        return max((row["step"] for row in found if row["kind"] == "training_step"), default=0)

    def told(event: str, replica: str) -> bool:
        logs = (run_dir / "logs").glob("orchestrator*")
        return any(event in line and replica in line for log in logs for line in log.read_text().splitlines())

    job = scheduler.submit(str(tmp_path / "out" / "job.sbatch"), cwd=ROOT, **variables)
    output = scheduler.directory / "jobs" / job / "output"

    def wait_for(condition: object, what: str) -> None:
        assert callable(condition)
        wait_until(lambda: scheduler.exit_code(job) is not None or condition(), what, timeout_s=TIMEOUT_S, every_s=0.2)
        assert scheduler.exit_code(job) is None, f"the job ended before {what}:\n{output.read_text()}"

    wait_for(lambda: steps() >= 1, "training")
    more = scheduler.submit("--array=1-1", str(tmp_path / "out" / "replica-a.sbatch"), cwd=ROOT, **variables)
    wait_for(lambda: told("replica.joined", f"a-{more}-1"), "a replica more")
    scheduler.call("scancel", f"{more}_1", cwd=ROOT)
    wait_for(lambda: scheduler.exit_code(f"{more}_1") is not None, "the end of the replica")

    scheduler.fail_node(job, 0)
    wait_for(lambda: scheduler.restarts(job) == 1, "a requeue")
    wait_for(lambda: f"going on with the run in {run_dir}" in output.read_text(), "the run to go on")
    before = steps()
    wait_for(lambda: steps() > before + 1, "training after the requeue")

    stopped = scheduler.call(sys.executable, "-m", "services.cli", "stop", str(run_dir), cwd=ROOT)
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: scheduler.exit_code(job) is not None, "the end of the job", timeout_s=TIMEOUT_S, every_s=0.2)
    assert scheduler.exit_code(job) == 0, output.read_text()
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "stopped"
