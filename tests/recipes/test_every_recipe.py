"""Every recipe of the reference runs its whole loop with ``--profile tiny``: all services as processes, three steps per
policy, evaluation, both ways of weights if the recipe has delta, and no remaining files.

``make test-recipes`` runs these one after another; ``make test`` leaves them out.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from services.common.config.loading import load_recipe
from services.orchestrator.buffer.buffer import LateRule
from tests.recipe_runs import ROOT, left_running, rows, run_recipe

RECIPES = sorted(path.parent.relative_to(ROOT / "recipes").as_posix() for path in ROOT.glob("recipes/*/*/recipe.yaml"))
TIMEOUT_S = 300.0  # of a run that takes some 40 s on two idle cores

pytestmark = pytest.mark.recipes


def test_all_twenty_are_there() -> None:
    assert len(RECIPES) == 20


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_its_whole_loop(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / name)
    settings = (f"run.dir={tmp_path}", "run.id=tiny")
    done = run_recipe(f"recipes/{name}", settings, "--profile", "tiny", timeout_s=TIMEOUT_S)
    run_dir = tmp_path / "tiny"
    steps = rows(run_dir, "training_step")
    for policy in recipe.policies:
        mine = [step for step in steps if step["policy"] == policy]
        assert [step["step"] for step in mine] == [1, 2, 3]
        for step in mine:
            broken = [key for key, value in step.items() if isinstance(value, float) and not math.isfinite(value)]
            assert not broken
            assert step["failures"] == 0
            oldest = LateRule.of(recipe.policies[policy].batch).most
            assert oldest is None or step["staleness_max"] <= oldest, "as the recipe's page says"
        # Half of what is said is right: a verifier may be rewarded twice, a purchase is worth less than 1.
        assert 0.05 < sum(step["batch_reward_mean"] for step in mine) / len(mine) < 1.5
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished"
    said = json.loads(done.stdout.splitlines()[-1])
    assert 0 < said["cores"] <= len(os.sched_getaffinity(0)) and said["load"] >= 0, "where its seconds were measured"
    moments = {evaluation.partition("/")[0] for evaluation in summary["evaluations"]}
    assert moments >= {"step-2", "end"}, "also while it trained"
    assert all(result["num_trajectories"] and not result["num_failed"] for result in summary["evaluations"].values())
    transfers = [transfer for transfer in rows(run_dir, "weight_transfer") if not transfer["error"]]
    for policy, section in recipe.policies.items():
        ways = {transfer["encoding"] for transfer in transfers if transfer["policy"] == policy}
        assert ways == ({"full", "delta"} if section.weights.transfer == "delta" else {"full"})
    assert not left_running(run_dir)
