"""``rollmill new`` and ``rollmill run`` as a new user would, outside the checkout: processes, a resumed run, its weights."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill import Run
from services.cli.__main__ import app
from tests.documented import blocks, files
from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S
from tests.waiting import PROCESS_S

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


def read(here: Path, *arguments: str) -> str:
    """The output of a command that starts no process, without one of its own."""
    with contextlib.chdir(here):
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


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


def test_a_run_whose_rollouts_all_fail_ends_with_the_reason_goes_on_once_repaired_and_commands_find_it(
    tmp_path: Path,
) -> None:
    read(tmp_path, "new", "mine")
    flow = tmp_path / "mine" / "flow.py"
    flow.write_text(FLOW.replace("LIMIT", "100"))
    done = ended(tmp_path, "run", "mine", *SHORT, "--set", "workflow.name=flow:Flow", "--set", "run.steps=9")
    assert done.returncode == 1, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    said = " ".join((done.stdout + done.stderr).split())
    assert "Without a terminal the run ends here" in said and "KeyError" in said and f"{flow}:11: 'lookup'" in said
    assert "rollmill run --resume" in said and str(run_dir) in said and not (run_dir / "summary.json").exists()
    assert "interrupted" in read(tmp_path, "status")
    flow.write_text(FLOW.replace("LIMIT", "1000000"))
    told = rollmill(tmp_path, "run", "--resume", str(run_dir), "--set", "run.steps=8")
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "finished"
    assert "rollmill trajectories" in told
    assert f"runs/{run_dir.name}: finished" in read(tmp_path, "status")
    assert "Largest of" in read(tmp_path, "trajectories", "--last", "1")
    read(tmp_path, "plot", "-o", "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    read(tmp_path, "export", "-o", "weights")
    files = list((tmp_path / "weights").glob("*.safetensors")) + list(run_dir.glob("warm_start/*/*.safetensors"))
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o644 for file in files)


# --- docs/my-environment.md (the other guides: tests/unit/test_guides.py)

GUIDE = "my-environment.md"


def test_the_environment_of_the_guide_is_trained_in(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    for name, text in files(GUIDE).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = [line.partition("#")[0].strip() for block in blocks(GUIDE, "sh") for line in block.splitlines()]
    follow(tmp_path, commands[0])
    (trial,) = (command for command in commands if "--profile tiny" in command)
    follow(tmp_path, trial)
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["evaluations"]["end/greedy"]["mean_reward"] == 0.5
    (shown,) = (command for command in commands if "trajectories" in command)
    assert "drawers. Open one" in follow(tmp_path, shown.replace("runs/my-environment-tiny-*", str(run_dir)))


def follow(directory: Path, command: str) -> str:
    """Run a command of the page in a directory; return its output."""
    program, *arguments = shlex.split(command)
    if program == "python":
        runpy.run_path(str(directory / arguments[0]))
        return ""
    return rollmill(directory, *arguments)


# --- examples/train.py


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
    run = Run(directory)
    trajectories = list(run.trajectories())
    assert len(trajectories) == len({(row["task_group_id"], row["index"]) for row in trajectories}) >= 8
    assert float(best.split()[1]) == max(row["reward"] for row in trajectories) > 0
    table = run.trajectories().arrow()
    assert table.column("reward").to_pylist() == [row["reward"] for row in run.trajectories()]
    assert list(run.metrics()) and run.metrics().arrow().num_rows == len(list(run.metrics()))
    assert run.recipe.modules == [str(REPOSITORY / "examples")] and run.summary["evaluations"]
    assert {row["task_group_id"] for row in run.traces()} == {row["task_group_id"] for row in trajectories}
