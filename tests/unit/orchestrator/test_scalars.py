"""Every tracker shows the same names, steps and units, and docs/trackers.md has them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.cli.inspect.run_state import read_metrics
from services.orchestrator.metrics import scalars_of
from tests.unit.orchestrator.metrics_rows import STEP, write_run


def test_scalars_have_group_step_and_time(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = [scalars for row in read_metrics(tmp_path) if (scalars := scalars_of(row)) is not None]
    first = found[0]
    assert (first.group, first.step, dict(first.values)) == ("model0", 1, STEP)
    assert {scalars.group for scalars in found} == {"model0", "throughput", "weights/model0/a"}
    assert next(s for s in found if s.group == "weights/model0/a").values["bits_per_change"] == 2.0


def test_an_evaluation_has_a_curve_for_each_sampling_and_dataset() -> None:
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    row = {
        "time": 1.0, "kind": "evaluation", "name": "step-8/greedy", "newest_versions": {"model0": 8}, "mean_reward": 0.5,
        "datasets": [{"name": "held_out", "mean_reward": estimate, "pass_at": {"4": estimate}}], "roles": {"model0/agent/0": 0.5},
    }  # fmt: skip
    found = scalars_of(row)
    assert found is not None and found.step == 8
    assert set(found.tagged) == {"evaluation/greedy", "evaluation/greedy/held_out", "evaluation/greedy/held_out/pass@4"}


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "text", True])
def test_what_is_no_finite_number_is_left_out(value: object) -> None:
    row = {"time": 1.0, "kind": "training_step", "policy": "model0", "step": 1, "x": value, "trainer/loss": 1.0}
    found = scalars_of(row)
    assert found is not None and dict(found.values) == {"trainer/loss": 1.0}


def test_rows_without_scalars_have_none() -> None:
    for kind in ("stall", "accounts", "summary", "threshold", "of a newer version"):
        assert scalars_of({"time": 1.0, "kind": kind}) is None
