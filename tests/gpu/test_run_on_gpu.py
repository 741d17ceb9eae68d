"""The quickstart's whole loop with trainer and engine on one card, started like a user's run: every process is real."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.recipe_runs import rows, run_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
]

STEPS = 20
TIMEOUT_S = 300.0
SETTINGS = [
    f"run.steps={STEPS}",
    "run.until=null",
    "evaluation.every=0",
    "data.evaluation.held_out.limit=128",
    "policies.model0.trainer.device=cuda",
    "policies.model0.trainer.compute_dtype=float32",
    "inference.a.device=cuda",
    "inference.a.dtype=float32",
]


@pytest.mark.parametrize("placement", ["apart", "shared"])
def test_twenty_steps_of_the_quickstart_learn_on_a_card(tmp_path: Path, placement: str) -> None:
    settings = [f"run.dir={tmp_path}", f"run.id={placement}", f"placement={placement}", *SETTINGS]
    if placement == "shared":
        settings += ["policies.model0.trainer.gpus=[0]", "inference.a.gpus=[0]"]
    done = run_recipe("recipes/quickstart", settings, timeout_s=TIMEOUT_S)
    summary = orjson.loads(done.stdout.strip().splitlines()[-1])
    assert summary["sampled_after"] > summary["sampled_before"] + 0.1
    steps = rows(tmp_path / placement, "training_step")
    assert len(steps) == STEPS
