"""Metrics are rows of JSON that can be read while they are written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from services.common.telemetry.metrics import MetricsWriter, RowKind


def test_rows_are_readable_at_once_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "orchestrator.jsonl"
    before = time.time()
    writer = MetricsWriter(path)
    writer.write("step", step=1, reward=np.float32(0.5), lengths=np.array([1, 2]))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert before <= row.pop("time") <= time.time()
    assert row == {"kind": "step", "step": 1, "reward": 0.5, "lengths": [1, 2]}
    writer.close()

    again = MetricsWriter(path)
    again.write("evaluation", name="end/greedy")
    again.close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["step", "evaluation"]


@pytest.mark.parametrize("name", ["time", "kind"])
def test_no_field_replaces_what_every_row_has(tmp_path: Path, name: str) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match=f"cannot be called {name}"):
        writer.write(RowKind.SUMMARY, **{name: {"replica/a": 1.0}})
    writer.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""
