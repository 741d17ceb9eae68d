"""The quickstart's whole loop with a server engine on a CPU, started like a user's run: every process is real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from services.common.telemetry.logs import LogEvent
from tests.recipe_runs import rows, run_recipe

STEPS = 10
TIMEOUT_S = 1200.0  # 100 s on four cores, four times that on two of half the speed
SETTINGS = [
    f"run.steps={STEPS}",
    "policies.model0.batch.late=drop",  # so that no token is older than max_staleness
    "data.evaluation.held_out.limit=128",
    "run.until=null",
    "evaluation.every=0",
]


def check_ten_steps(engine: str, tmp_path: Path, more: Sequence[str] = ()) -> None:
    """Run ten steps; they learn, and every version is served. ``more``: settings of the recipe."""
    own = [f"run.dir={tmp_path}", f"run.id={engine}", f"inference.a.engine={engine}", *SETTINGS, *more]
    done = run_recipe("recipes/quickstart", own, timeout_s=TIMEOUT_S)
    run = tmp_path / engine
    summary = orjson.loads(done.stdout.strip().splitlines()[-1])
    assert summary["sampled_after"] > summary["sampled_before"] + 0.1
    assert summary["max_staleness"] <= 1
    assert len(rows(run, "training_step")) == STEPS
    logs = list((run / "logs").glob(f"{engine}-a-model0-*.log"))
    assert len(logs) == 1
    switches = [
        row
        for line in (run / "logs" / "inference-a.jsonl").read_bytes().splitlines()
        if (row := orjson.loads(line)).get("event") == LogEvent.ENGINE_UPDATED
    ]
    assert [row["version"] for row in switches] == sorted(row["version"] for row in switches)
    assert switches[-1]["version"] == STEPS
