"""docs/my-environment.md, followed to its end: real processes on two cores. The other guides: tests/unit/test_guides.py."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path

import pytest

from tests.documented import blocks, files
from tests.e2e.conftest import REPOSITORY
from tests.e2e.test_first_run import rollmill

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


def follow(directory: Path, command: str) -> str:
    """Run a command of the page in a directory; return its output."""
    program, *arguments = shlex.split(command)
    if program == "python":
        runpy.run_path(str(directory / arguments[0]))
        return ""
    return rollmill(directory, *arguments)
