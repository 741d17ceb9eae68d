"""``run.until`` in real processes: training ends early, the last version is exported, and the end is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from benchmarks._journal_audit import audit
from services.common.checkpoints import steps
from services.common.export import NOTE
from services.orchestrator.journal.reader import JournalReader
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

MOST_STEPS = 500
SETTINGS = [
    f"run.steps={MOST_STEPS}",
    "run.until={evaluation: sampled, at_least: -1.0}",  # the second evaluation during training holds it in any case
    "evaluation.every=1",
    "evaluation.share=1.0",
    "evaluation.at_start=false",
    "data.evaluation.held_out.limit=8",
]


def test_a_run_ends_at_its_threshold_though_its_orchestrator_is_killed(start_run: Callable[..., Run]) -> None:
    run = start_run("until", *SETTINGS)
    run.wait_for(lambda: run.rows("evaluation"), "the first evaluation")
    run.kill("orchestrator")
    told = run.finish()
    assert told["threshold_reached"] and told["threshold_seconds"] > 0
    summary = json.loads((run.directory / "summary.json").read_text())
    last = summary["steps"]["model0"]
    assert told["threshold_step"] <= last < MOST_STEPS
    ended = summary["evaluations"]["end/sampled"]
    assert ended["pinned"] and ended["versions"] == {"model0": last}
    assert {name for name in summary["evaluations"] if name.startswith("step-")} <= {
        f"step-{step}/sampled" for step in range(1, last + 1)
    }
    assert all(found["pinned"] for found in summary["evaluations"].values()), "also those beside training"
    assert run.steps() == last == steps(run.directory / "checkpoints" / "model0")[-1]
    note = json.loads((run.directory / "export" / "model0" / NOTE).read_text())
    assert note["training_step"] == last
    assert "threshold reached after training step" in run.output
    reader = JournalReader(run.directory / "journal")
    try:
        assert audit(reader, finished=True).clean
    finally:
        reader.close()
