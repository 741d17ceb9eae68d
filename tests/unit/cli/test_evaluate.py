"""``rollmill eval``: the chosen checkpoints and the output; ``rollmill plot`` and the headline of a run."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from services.cli.inspect.plot import curves, grouped, plot_runs
from services.cli.inspect.run_state import read_metrics
from services.cli.inspect.standing import standing
from services.cli.plan import plan
from services.cli.run.evaluate import comparable, compare, evaluation_recipe, plot_scores
from services.cli.run.launch import headline
from services.cli.watch import ProgressView, evaluations_table, threshold_words
from services.common.config.loading import RESOLVED, load_recipe, save_resolved, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.pb import run_pb2
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import (
    DatasetScore,
    Estimate,
    EvaluationResult,
    from_json,
    overall,
    score,
    to_json,
)
from services.orchestrator.journal.journal import Journal
from services.orchestrator.metrics import RunMetrics, evaluation_values, scalars_of
from services.orchestrator.progress import evaluation_to_proto

ROOT = Path(__file__).parents[3]


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def result_of(
    *scores: DatasetScore,
    name: str = "start/greedy",
    version: int = 0,
    difference: Estimate | None = None,
    policy: str = "a",
) -> EvaluationResult:
    """An evaluation of one policy."""
    return EvaluationResult(
        name=name, versions={policy: version}, newest_versions={policy: version}, pinned=True, mean_reward=overall(scores),
        num_trajectories=sum(one.num_items * one.samples_per_item for one in scores),
        num_failed=sum(len(one.failed) for one in scores), datasets=scores,
        compared_with="start/greedy" if difference else "", difference=difference,
    )  # fmt: skip


def two_policies() -> Recipe:
    tree = {
        "name": "pair",
        "policies": {name: {"model": {"path": "org/model"}, "trainer": {"port": 0}, "weights": {"port": 0}} for name in "ab"},
        "data": {"train": {"path": "unused"}, "evaluation": {"d": {"path": "unused"}}},
    }  # fmt: skip
    return validate(tree, source="test")


def test_nothing_is_trained_and_the_checkpoint_replaces_the_warm_start(tmp_path: Path) -> None:
    recipe = evaluation_recipe(load_recipe(ROOT / "recipes/quickstart"), [str(checkpoint(tmp_path / "model"))])
    assert recipe.policies["model0"].model.path == str(tmp_path / "model")
    assert (recipe.run.steps, recipe.warm_start, recipe.evaluation.at_end) == (0, {}, False)
    assert not [spec.name for spec in plan(recipe, tmp_path) if spec.name.startswith("trainer")]


def test_an_adapter_is_part_of_the_checkpoint_that_is_evaluated(tmp_path: Path) -> None:
    own = ["policies.model0.adapter.rank=4", "policies.model0.adapter.alpha=8"]
    recipe = load_recipe(ROOT / "recipes/quickstart", own)
    assert recipe.policies["model0"].adapter is not None
    evaluated = evaluation_recipe(recipe, [str(checkpoint(tmp_path / "model"))])
    assert evaluated.policies["model0"].adapter is None


def test_a_run_directory_gives_the_exports_of_its_policies(tmp_path: Path) -> None:
    for name in "ab":
        checkpoint(tmp_path / "export" / name)
    recipe = evaluation_recipe(two_policies(), [str(tmp_path)])
    assert [p.model.path for p in recipe.policies.values()] == [str(tmp_path / "export" / name) for name in "ab"]


def test_one_of_several_policies_is_named(tmp_path: Path) -> None:
    recipe = evaluation_recipe(two_policies(), [f"b={checkpoint(tmp_path / 'b')}"])
    assert [p.model.path for p in recipe.policies.values()] == ["org/model", str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/nowhere", "POLICY=PATH"),
        ("c=org/model", "no policy 'c'"),
        ("a=/nowhere", "/nowhere does not exist"),
        ("a={empty}", "holds no config.json"),
    ],
)
def test_a_checkpoint_that_is_none_is_told(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluation_recipe(two_policies(), [given.format(empty=tmp_path)])


def test_a_recipe_without_evaluation_data_is_told() -> None:
    recipe = two_policies().model_copy(update={"data": two_policies().data.model_copy(update={"evaluation": {}})})
    with pytest.raises(ConfigError, match=r"no data\.evaluation"):
        evaluation_recipe(recipe, [])


def test_table_and_picture_show_every_dataset_with_its_interval(tmp_path: Path) -> None:
    scores = (
        score("easy", ["1", "2"], [[1.0, 1.0], [1.0, 0.0]], [False, True], 1.0),
        score("hard", ["1", "2"], [[0.0, 0.0], [0.0, 0.0]], [False, False], 1.0),
    )
    result = result_of(*scores)
    console = Console(width=120, record=True)
    console.print(evaluations_table([evaluation_to_proto(result)]))
    text = console.export_text()
    for words in ("easy", "0.750", "@2 1.000", "hard", "overall", "0.375"):
        assert words in text
    assert plot_scores([result], "pair", tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_a_run_tells_each_change_from_the_first_evaluation_with_its_interval() -> None:
    def result(name: str, version: int, difference: Estimate | None) -> EvaluationResult:
        found = score("held_out", ["1", "2"], [[1.0], [0.0]], [False, False], 1.0, "digest")
        return result_of(replace(found, difference=difference), name=name, version=version, difference=difference)

    results = [result("start/greedy", 0, None), result("end/greedy", 9, Estimate(0.25, -0.125, 0.625))]
    progress = run_pb2.RunProgress(evaluations=[evaluation_to_proto(one) for one in results])
    console = Console(width=80, record=True)
    console.print(evaluations_table(progress.evaluations))
    lines = console.export_text().splitlines()
    assert "change (95%)" in lines[0]
    assert [("+0.250 (-0.125..+0.625)" in line) for line in lines[1:3]] == [False, True]
    plain = io.StringIO()
    with ProgressView(Console(file=plain, width=120), "run") as view:
        view.show(progress)
    assert "evaluation end/greedy: 0.500 over 2, change +0.250 (-0.125..+0.625) since start/greedy" in plain.getvalue()


def test_an_evaluation_whose_rollouts_all_failed_shows_no_number_anywhere(tmp_path: Path) -> None:
    lost = score("held_out", ["1", "2"], [[0.0], [0.0]], [1, 1], 1.0, "digest")
    result = result_of(lost)
    assert from_json(EvaluationResult, to_json(result)) == result
    summary = evaluation_values(result)
    progress = run_pb2.RunProgress(evaluations=[evaluation_to_proto(result)])
    out = io.StringIO()
    console = Console(file=out, width=160)
    with ProgressView(console, "run") as view:
        view.show(progress)
    console.print(evaluations_table(progress.evaluations))
    assert headline({"evaluations": {"start/greedy": summary}})["greedy_before"] is None
    assert plot_scores([result], "lost", tmp_path / "eval.png").is_file()
    save_resolved(load_recipe(ROOT / "recipes/quickstart"), tmp_path)
    metrics = RunMetrics(tmp_path, tensorboard=False)
    metrics.evaluation(result)
    metrics.close()
    (row,) = read_metrics(tmp_path)
    scalars = scalars_of(row)
    assert scalars is not None and not scalars.values
    assert plot_runs([tmp_path], tmp_path / "run.png") is None, "nothing to draw"
    out.write("\n".join(standing(tmp_path).lines()))
    told = out.getvalue()
    assert "0.0" not in told and "nan" not in told
    assert "evaluation start/greedy: - over 2; 2 failed" in told
    assert "start/greedy: -; 2 failed" in told


def finished(run_dir: Path, rewards: dict[str, list[float]], items: str = "digest") -> Path:
    """A run directory with one evaluation in its journal."""
    run_dir.mkdir()
    (run_dir / RESOLVED).write_text("")
    result = result_of(
        *(score(name, ["x"] * len(r), [[v] for v in r], [False] * len(r), 1.0, items) for name, r in rewards.items())
    )

    async def write() -> None:
        journal = Journal(run_dir / "journal")
        journal.start()
        await journal.append(entries.EVALUATION, result.name, result)
        await journal.close()

    asyncio.run(write())
    return run_dir


def test_checkpoints_are_compared_item_by_item_with_the_evaluation_of_another_run(tmp_path: Path) -> None:
    """Two `eval` runs draw common random numbers; their difference is shown with its interval, in table and picture."""
    base = comparable(finished(tmp_path / "one", {"easy": [0.0, 0.0, 1.0, 0.0], "hard": [0.0, 0.0]}))
    found = comparable(finished(tmp_path / "two", {"easy": [1.0, 0.0, 1.0, 0.0], "hard": [0.0, 0.0]}))
    results, left_out = compare(found, base, "one")
    assert left_out == [] and results[0].compared_with == "one start/greedy"
    console = Console(width=120, record=True)
    console.print(evaluations_table(map(evaluation_to_proto, results)))
    both, easy, hard = console.export_text().splitlines()[1:4]
    assert "+0.250 (-0.546..+1.046)" in easy and "+0.000 (+0.000..+0.000)" in hard
    assert "+0.125 (-0.273..+0.523)" in both
    assert plot_scores(results, "pair", tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_told(tmp_path: Path) -> None:
    found = comparable(finished(tmp_path / "two", {"easy": [1.0, 0.0]}))
    others = comparable(finished(tmp_path / "one", {"easy": [1.0, 0.0]}, items="other tasks"))
    _, left_out = compare(found, others, "one")
    assert left_out == ["greedy easy: its tasks are others, it has one alone, or every rollout failed"]
    assert compare(found, {"sampled": others["greedy"]}, "one")[1] == ["greedy: there is only sampled"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="is no run directory"):
        comparable(empty)
    (empty / RESOLVED).write_text("")
    with pytest.raises(ConfigError, match="has not begun"):
        comparable(empty)


# --- pictures and the headline of a run


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


def recipe_of(run: Path, **settings: Any) -> None:
    (run / "recipe.json").write_bytes(orjson.dumps({"run": settings, "orchestrator": {"port": hash(run.name) % 1000}}))


def test_runs_that_differ_in_the_seed_alone_are_one_curve(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 4) for name in ("one", "two", "other")]
    for seed, run in enumerate(runs):
        recipe_of(run, id=run.name, seed=seed, steps=4 if run.name != "other" else 9)
    groups = grouped({run: read_metrics(run) for run in runs})
    assert [(group.label, len(group.rows)) for group in groups] == [("one and 1 other seed", 2), ("other", 1)]


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
    panels = {panel["title"]: panel for panel in curves({run: read_metrics(run)})["panels"]}
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
    told = threshold_words(run_pb2.Threshold(**until))
    assert told == "threshold reached after training step 30, 61 s into the run: sampled reward at least 0.9"
    missed: dict[str, Any] = {**summary, "until": {**until, "newest": 0.5, "reached": False, "step": 0, "seconds": 0.0}}
    assert headline(missed)["threshold_reached"] is False and "threshold_step" not in headline(missed)
    told = threshold_words(run_pb2.Threshold(**missed["until"]))
    assert told == "threshold not reached: sampled reward at least 0.9 (newest: 0.500)"
