"""``millrace eval``: which checkpoints are taken, and what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from services.cli.evaluate import evaluation_recipe, failed_items, plot_scores, scores_table
from services.cli.plan import plan
from services.common.config.loading import load_recipe, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.metrics import evaluation_values
from services.orchestrator.scores import score

ROOT = Path(__file__).parents[3]


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


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
    result = EvaluationResult(
        name="start/greedy", versions={"a": 0}, newest_versions={"a": 0}, pinned=True, mean_reward=0.375,
        num_trajectories=8, num_failed=1, datasets=scores,
    )  # fmt: skip
    evaluations = {"start/greedy": evaluation_values(result)}
    console = Console(width=120, record=True)
    console.print(scores_table(evaluations))
    text = console.export_text()
    for words in ("easy", "75.0 (k=2)", "@2 100.0", "hard", "overall", "37.5"):
        assert words in text
    assert failed_items(evaluations) == ["start/greedy easy 2"]
    assert plot_scores(evaluations, "pair", tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
