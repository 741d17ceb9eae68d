"""A run whose engine computes something else is paused before its first update, with the cause, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.numerics_gate import INJECTED, with_fault
from services.cli.doctor import Failure, examine
from services.common.checkpoints import steps
from services.common.telemetry.metrics import RowKind
from services.orchestrator.stalls import Cause
from tests.recipe_runs import rows

pytestmark = pytest.mark.slow


def test_an_engine_with_another_temperature_stops_its_run_before_the_first_update(tmp_path: Path) -> None:
    case = next(case for case in INJECTED if case.name == "temperature")
    told = with_fault(case, tmp_path)
    assert told.get("cause") == "temperature" and told["step"] == 1, told
    assert "inference.a.dtype float32" in told["message"]
    run_dir = tmp_path / case.name
    assert not rows(run_dir, "training_step") and not steps(run_dir / "checkpoints" / "model0")
    stalls = rows(run_dir, RowKind.STALL)
    assert {row["component"] for row in stalls if row.get("cause") == Cause.NUMERICS.value} == {"trainer/model0"}
    assert [finding.failure for finding in examine(run_dir).findings] == [Failure.MISMATCH]
    assert json.loads((run_dir / "recipe.json").read_text())["policies"]["model0"]["trainer"]["max_mismatch"] is None
