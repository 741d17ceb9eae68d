"""Three training steps with the true packages: tools of an MCP server, a task of reasoning-gym, an environment of gymnasium, and
task directories of Harbor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.test_every_recipe import ROOT, TIMEOUT_S, left_running, rows

pytestmark = pytest.mark.recipes


@pytest.mark.parametrize(
    ("example", "script"),
    [
        pytest.param("mcp", "call_add", marks=pytest.mark.needs("mcp")),
        pytest.param("reasoning_gym", "answer", marks=pytest.mark.needs("reasoning-gym")),
        pytest.param("gymnasium", "cross", marks=pytest.mark.needs("gymnasium")),
        pytest.param("harbor", "add_lines", marks=pytest.mark.needs("sandbox tier 2")),
    ],
)
def test_an_example_trains_three_steps(example: str, script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli", "run", f"examples/{example}.yaml", "--profile", "tiny", "--json"),
            *("--set", f"run.dir={tmp_path}", "--set", "run.id=tiny"),
            *("--set", f"inference.a.forced.script=tests.recipes.scripts:{script}"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run_dir = tmp_path / "tiny"
    steps = rows(run_dir, "training_step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["failures"] == 0
        assert 0.1 < step["batch_reward_mean"] < 0.9, "half of the answers are right"
    assert not left_running(run_dir)
