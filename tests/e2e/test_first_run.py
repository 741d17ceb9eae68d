"""``rollmill new`` and ``rollmill run`` as a new user would, outside the checkout: processes, a resumed run, its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S

pytestmark = pytest.mark.slow
SHORT = ["--set", "run.steps=2", "--set", "warm_start.model0.steps=2", "--set", "evaluation.every=0",
         "--set", "policies.model0.batch.dynamic_sampling=false", "--set", "evaluation.at_start=false", "--set", "evaluation.at_end=false", "--set", "policies.model0.batch.size=16"]  # fmt: skip


def ended(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def rollmill(here: Path, *arguments: str) -> str:
    done = ended(here, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_folder_runs_at_once_and_commands_find_its_run(tmp_path: Path) -> None:
    rollmill(tmp_path, "new", "mine")
    told = rollmill(tmp_path, "run", "mine", *SHORT)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "finished"
    assert "rollmill trajectories" in told
    assert f"runs/{run_dir.name}: finished" in rollmill(tmp_path, "status")
    assert "Largest of" in rollmill(tmp_path, "trajectories", "--last", "1")
    rollmill(tmp_path, "export", "-o", "weights")
    files = list((tmp_path / "weights").glob("*.safetensors")) + list(run_dir.glob("warm_start/*/*.safetensors"))
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o644 for file in files)


FLOW = """
import rollmill
PLAYED = 0
class Flow(rollmill.Workflow):
    async def run(self, task, context):
        global PLAYED
        PLAYED += 1
        chat = self.converse(task, context)
        await chat.respond()
        if PLAYED > LIMIT:
            raise KeyError("lookup")
        return chat.outcome(float(PLAYED % 2))
"""


def test_a_run_whose_rollouts_all_fail_ends_with_the_reason_and_goes_on_once_repaired(tmp_path: Path) -> None:
    rollmill(tmp_path, "new", "mine")
    flow = tmp_path / "mine" / "flow.py"
    flow.write_text(FLOW.replace("LIMIT", "24"))
    done = ended(tmp_path, "run", "mine", *SHORT, "--set", "workflow.name=flow:Flow", "--set", "run.steps=9")
    assert done.returncode == 1, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    said = " ".join((done.stdout + done.stderr).split())
    assert "Without a terminal the run ends here" in said and "KeyError" in said and f"{flow}:11: 'lookup'" in said
    assert "rollmill run --resume" in said and str(run_dir) in said and not (run_dir / "summary.json").exists()
    assert "interrupted" in rollmill(tmp_path, "status")
    flow.write_text(FLOW.replace("LIMIT", "1000000"))
    rollmill(tmp_path, "run", "--resume", str(run_dir), "--set", "run.steps=2")
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "finished"
