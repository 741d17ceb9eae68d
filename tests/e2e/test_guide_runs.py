"""docs/my-environment.md and the agent with a tool of docs/my-agent.md, followed to their ends: real processes on two cores."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import blocks, files
from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S

pytestmark = pytest.mark.slow
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


def test_the_agent_with_a_tool_of_the_guide_is_trained(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    for name, text in files("my-agent.md").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    follow(tmp_path, "rollmill run mine/adder.yaml --profile tiny")
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["steps"] == {"model0": 3}
    told = follow(tmp_path, f"rollmill trajectories {run_dir} --last 1")
    assert '"name": "add"' in " ".join(told.split()) and "tool" in told


def follow(directory: Path, command: str) -> str:
    """Run a command of the page in a directory; return its output."""
    program, *arguments = shlex.split(command)
    python = {"python": [], "rollmill": ["-m", "services.cli"]}[program]
    done = subprocess.run(
        [sys.executable, *python, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
