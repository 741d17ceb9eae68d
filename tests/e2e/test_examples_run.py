"""``examples/train.py`` as a user runs the script: in a folder of his own, with a subfolder ``services``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollmill
from tests.waiting import PROCESS_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_run_of_the_examples_is_started_and_read_from_python(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the folder of the user was imported')\n")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "train.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is hidden by Rollmill's own package" in done.stderr
    scores, best, traced = done.stdout.splitlines()
    assert "start/sampled" in scores and "'evaluated'" in traced
    (directory,) = (tmp_path / "runs").iterdir()
    run = rollmill.Run(directory)
    trajectories = list(run.trajectories())
    assert len(trajectories) == len({(row["task_group_id"], row["index"]) for row in trajectories}) >= 8
    assert float(best.split()[1]) == max(row["reward"] for row in trajectories) > 0
    table = run.trajectories().arrow()
    assert table.column("reward").to_pylist() == [row["reward"] for row in run.trajectories()]
    assert list(run.metrics()) and run.metrics().arrow().num_rows == len(list(run.metrics()))
    assert run.recipe.modules == [str(REPOSITORY / "examples")] and run.summary["evaluations"]
    assert {row["task_group_id"] for row in run.traces()} == {row["task_group_id"] for row in trajectories}
