"""Three training steps with the true packages: tools of an MCP server, a task of reasoning-gym, an environment of gymnasium, and
task directories of Harbor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe_runs import left_running, rows, run_recipe
from tests.recipes.test_every_recipe import TIMEOUT_S

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
    script_of_policy = f"inference.a.forced.script=tests.recipes.scripts:{script}"
    settings = (f"run.dir={tmp_path}", "run.id=tiny", script_of_policy)
    run_recipe(f"examples/{example}.yaml", settings, "--profile", "tiny", timeout_s=TIMEOUT_S)
    run_dir = tmp_path / "tiny"
    steps = rows(run_dir, "training_step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["failures"] == 0
        assert 0.1 < step["batch_reward_mean"] < 0.9, "half of the answers are right"
    assert not left_running(run_dir)
