"""A recipe for eight GPUs, run whole on two cores with ``--profile tiny``: real processes, about half of the answers right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from services.common.telemetry.logs import LogEvent
from tests.e2e.conftest import REPOSITORY

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = {
    "extends": str(REPOSITORY / "recipes" / "base.yaml"),
    "name": "big",
    "run": {"steps": 1200},
    "policies": {
        "model0": {
            "model": {"path": "Qwen/Qwen3-8B", "context_length": 16384},
            "algorithm": {"name": "m2po", "kl_coefficient": 0.001, "batch_normalize_advantages": True},
            "optimizer": {"lr": 1e-4},
            "batch": {"size": 256, "minibatches": 4, "max_staleness": 8},
            "trainer": {"num_ranks": 4, "compute_dtype": "bfloat16", "gradient_checkpointing": True},
            "weights": {"transfer": "delta", "full_every": 10},
        }
    },
    "workflow": {"name": "single_turn", "settings": {"reward": "math"}},
    "data": {"train": {"name": "dapo-math-17k"}, "evaluation": {"aime": {"name": "aime24"}}},
    "evaluation": {"at_start": False, "every": 25, "samples_per_task": 4},
    "sampling": {"max_new_tokens": 1024, "top_p": 0.95, "top_k": 50},
    "inference": {"a": {"engine": "sglang", "num_slots": 512}},
}


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics" / "orchestrator.jsonl").read_bytes().splitlines()
    return [row for row in map(orjson.loads, lines) if row["kind"] == kind]


def test_a_recipe_runs_its_whole_loop(
    rollmill: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    monkeypatch.delenv("ROLLMILL_DATA_ROOT", raising=False)
    settings = ["--set", f"run.dir={tmp_path}", "--set", "run.id=tiny"]
    code, output = rollmill("run", recipe, "--profile", "tiny", *settings, "--json")
    assert code == 0, output
    run_dir = tmp_path / "tiny"
    steps = rows(run_dir, "training_step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        values = {name: value for name, value in step.items() if isinstance(value, float)}
        assert not [name for name, value in values.items() if not math.isfinite(value)]
        assert step["trainer/grad_norm"] > 0
        assert step["trainer/updates_applied"] == 4
    assert 0.2 < sum(step["batch_reward_mean"] for step in steps) / len(steps) < 0.8
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert set(summary["evaluations"]) == {"step-2/greedy", "end/greedy"}
    transfers = [json.loads(line)["mode"] for line in weights_log(run_dir)]
    assert sorted(set(transfers)) == ["delta", "full"]


def weights_log(run_dir: Path) -> list[str]:
    return [
        line
        for line in (run_dir / "logs" / "inference-a.jsonl").read_text().splitlines()
        if LogEvent.WEIGHTS_UPDATED in line
    ]
