"""What ``millrace plot`` and the headline make of metrics."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from services.cli.plot import plot_runs, training_steps
from services.cli.rows import read_metrics
from services.cli.run import headline
from services.common.errors import ConfigError


def write_run(directory: Path, steps: int) -> Path:
    (directory / "metrics").mkdir(parents=True)
    rows = [
        {"time": float(s), "kind": "training_step", "policy": "model0", "step": s, "rollout_reward_mean": s / 10}
        for s in range(1, steps + 1)
    ]
    text = b"\n".join(orjson.dumps(row) for row in rows)
    (directory / "metrics" / "orchestrator.jsonl").write_bytes(text + b'\n{"kind": "torn')
    return directory


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    assert len(read_metrics(write_run(tmp_path / "run", 3))) == 3


def test_of_a_step_told_twice_the_last_counts() -> None:
    rows = [
        {"kind": "training_step", "policy": "p", "step": 1, "rollout_reward_mean": 0.1},
        {"kind": "training_step", "policy": "p", "step": 1, "rollout_reward_mean": 0.2},
    ]
    assert [row["rollout_reward_mean"] for row in training_steps(rows)["p"]] == [0.2]


def test_several_runs_make_one_picture(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 4) for name in ("one", "two")]
    picture = plot_runs(runs, tmp_path / "both.png")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_has_no_picture(tmp_path: Path) -> None:
    assert plot_runs([write_run(tmp_path / "run", 0)], tmp_path / "none.png") is None


def test_a_directory_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        read_metrics(tmp_path)


def test_the_headline_names_samplings_before_and_after() -> None:
    summary = {
        "evaluations": {
            "start/greedy": {"mean_reward": 0.01, "roles": {"model0/agent/0": 0.01}},
            "end/greedy": {"mean_reward": 0.9, "roles": {"model0/solver/0": 0.8, "model1/verifier/0": 1.0}},
        },
        "overlap_share": 0.8,
        "max_staleness": 1,
        "seconds": 100.0,
        "cpu_seconds": 200.0,
        "cores": 2,
        "load": 0.5,
    }
    flat = headline(summary)
    assert (flat["greedy_before"], flat["greedy_after"], flat["max_staleness"]) == (0.01, 0.9, 1)
    assert (flat["greedy/model0/solver/0_after"], flat["greedy/model1/verifier/0_after"]) == (0.8, 1.0)
    assert (flat["cores"], flat["load"]) == (2, 0.5), "no figure is read without them"
    assert "greedy/model0/agent/0_before" not in flat, "one role says nothing more"
