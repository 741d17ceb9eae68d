"""``rollmill plot`` and the headline of a run, from metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.cli.inspect.plot import Points, band, curves, grouped, plot_runs
from services.cli.inspect.run_state import read_metrics, training_steps
from services.cli.run.launch import headline, how_training_ended


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


def recipe_of(run: Path, **settings: Any) -> None:
    (run / "recipe.json").write_bytes(orjson.dumps({"run": settings, "orchestrator": {"port": hash(run.name) % 1000}}))


def test_runs_that_differ_in_the_seed_alone_are_one_curve(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 4) for name in ("one", "two", "other")]
    for seed, run in enumerate(runs):
        recipe_of(run, id=run.name, seed=seed, steps=4 if run.name != "other" else 9)
    groups = grouped(runs)
    assert [(group.label, len(group.rows)) for group in groups] == [("one and 1 other seed", 2), ("other", 1)]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.floats(-5, 5)), max_size=12, unique_by=lambda p: p[0]), max_size=5
    )
)
def test_a_band_holds_the_mean_and_every_curve_that_reaches_there(runs: list[Points]) -> None:
    found = band([[(float(x), y) for x, y in points] for points in runs])
    if sum(bool(points) for points in runs) < 2:
        assert found is None
    if found is None:
        return
    x, mean, low, high = (np.array(found[name]) for name in ("x", "y", "low", "high"))
    assert (low <= mean + 1e-9).all() and (mean <= high + 1e-9).all()
    for points in runs:
        for at, y in points:
            assert all(low[place] - 1e-9 <= y <= high[place] + 1e-9 for place in np.flatnonzero(x == at))


def add(run: Path, *rows: dict[str, Any]) -> None:
    path = run / "metrics" / "orchestrator.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows) + path.read_bytes())


def test_evaluations_are_points_at_their_newest_version_and_a_threshold_is_a_mark(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 4)
    mean = {"value": 0.5, "low": 0.4, "high": 0.7}
    played = {"time": 5.0, "kind": "evaluation", "mean_reward": 0.5, "versions": {"frozen": 0, "model0": 3},
              "newest_versions": {"frozen": 0, "model0": 8}}  # fmt: skip
    one = {**played, "name": "start/greedy", "datasets": [{"name": "held_out", "mean_reward": mean}]}
    two = {**played, "name": "start/two", "datasets": [*one["datasets"], *one["datasets"]]}
    reached = {"time": 5.0, "kind": "threshold", "wanted": "sampled reward at least 0.9", "step": 3, "seconds": 5.0}
    shares = {"trainer/model0": {"training": 0.7, "waiting for a batch -> orchestrator": 0.29, "publishing": 0.01}}
    add(
        run,
        {"kind": "accounts", "time": 2.0, "shares": shares},
        one,
        two,
        reached,
        *({"time": float(s), "kind": "throughput", "tokens_per_s": 9.0 + s} for s in range(3)),
    )
    panels = {panel["title"]: panel for panel in curves([run])["panels"]}
    first = panels["reward by step"]
    assert [(p["label"], p["x"], p["y"], p["low"], p["high"]) for p in first["points"]] == [
        ("greedy", 8, 0.5, 0.4, 0.7),
        ("two", 8, 0.5, None, None),
    ]
    assert first["marks"] == [{"x": 3, "label": "sampled reward at least 0.9"}]
    assert panels["throughput"]["lines"][0]["y"] == [9.0, 10.0, 11.0]
    assert not panels["loss"]["points"] and not panels["loss"]["lines"]
    assert plot_runs([run], tmp_path / "points.png") is not None


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
    assert headline(summary, short=True)["greedy/model0/solver_after"] == 0.8
    assert "greedy/model0/agent/0_before" not in flat, "one role says nothing more"


def test_the_end_says_whether_the_threshold_was_reached() -> None:
    until: dict[str, Any] = {
        "wanted": "sampled reward at least 0.9",
        "newest": 0.91,
        "reached": True,
        "step": 30,
        "seconds": 61.4,
    }
    summary = {"steps": {"model0": 32}, "until": until, "seconds": 80.0}
    flat = headline(summary)
    assert (flat["threshold_reached"], flat["threshold_step"], flat["threshold_seconds"]) == (True, 30, 61.4)
    assert how_training_ended(summary).startswith("threshold reached after training step 30, 61 s into the run")
    missed: dict[str, Any] = {**summary, "until": {**until, "newest": 0.5, "reached": False, "step": 0, "seconds": 0.0}}
    assert headline(missed)["threshold_reached"] is False
    assert "threshold_step" not in headline(missed)
    told = how_training_ended(missed)
    assert told.startswith("threshold not reached in 32 training steps") and told.endswith("newest evaluation 0.500")
    never = {**missed, "until": {**missed["until"], "newest": None}}
    assert how_training_ended(never).endswith("no evaluation that counts")
    assert how_training_ended({"steps": {}, "until": None}) == ""
    assert "threshold_reached" not in headline({"until": None})
