"""``rollmill run --resume RUN --set``: settings that may change, refusals with their reason, and the note that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.run.directory import save_changes, with_changes
from services.common.checkpoints import path_of
from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.telemetry.metrics import MetricsWriter, RowKind

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "quick"
    here = ["run.id=quick", f"run.dir={tmp_path / 'runs'}", "policies.model0.optimizer.total_updates=null"]
    recipe = load_recipe(REPOSITORY / "recipes/quickstart", here, {})
    save_resolved(recipe, directory)
    return directory


def begin(run_dir: Path, steps: int = 10, checkpoint: int = 10) -> Recipe:
    """The run has trained ``steps`` steps, and its newest checkpoint is of ``checkpoint``; 0 is none."""
    if checkpoint:
        path_of(run_dir / "checkpoints" / "model0", checkpoint).mkdir(parents=True)
    (run_dir / "metrics").mkdir()
    writer = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
    for step in range(1, steps + 1):
        writer.write(RowKind.TRAINING_STEP, policy="model0", step=step)
    writer.close()
    return load_resolved(run_dir)


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=120",
        "policies.model0.optimizer.lr=5.0e-4",
        "policies.model0.trainer.max_mismatch=0.2",
        "workflow.settings.reward=recipes.quickstart.reward:other",
        "sampling.max_new_tokens=20",
        "evaluation.every=7",
        "rollout.timeout_s=99",
        "launch.restarts=1",
        "modules=[/elsewhere]",
        "data.train.max_prompt_tokens=100",
    ],
)
def test_what_the_records_do_not_depend_on_may_change(run_dir: Path, override: str) -> None:
    changed, changes = with_changes(begin(run_dir), run_dir, [override])
    key = override.partition("=")[0]
    save_changes(changed, run_dir, changes)
    assert load_resolved(run_dir) == changed
    assert changed != load_recipe(REPOSITORY / "recipes/quickstart", (), {})
    rows = [json.loads(line) for line in (run_dir / "recipe.changes.jsonl").read_text().splitlines()]
    assert key in [row["setting"] for row in rows] and all(row["from"] != row["to"] for row in rows)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("name=other", "name of the run"),
        ("run.id=other", "name of the run's directory"),
        ("run.dir=/elsewhere", "move its directory"),
        ("run.seed=2", "drawn with it"),
        ("run.steps=5", "has trained 10 steps: write 10 or more"),
        ("policies.model0.model.context_length=64", "checkpoints of the run"),
        ("policies.model0.algorithm.name=grpo", "replayed with the loss"),
        ("policies.model0.batch.size=32", "recorded batches"),
        ("policies.model0.weights.publish_dtype=bfloat16", "published versions"),
        ("rollout.group_size=4", "task groups"),
        ("sampling.temperature=0.7", "log-probabilities"),
        ("data.train.seed=3", "order of the run's tasks"),
        ("warm_start.model0.steps=3", "starting checkpoint"),
    ],
)
def test_what_the_records_depend_on_is_refused_with_the_reason(run_dir: Path, override: str, why: str) -> None:
    before = (run_dir / "recipe.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        with_changes(begin(run_dir), run_dir, [override])
    assert override.partition("=")[0] in caught.value.message and why in caught.value.message
    assert (run_dir / "recipe.json").read_bytes() == before


@pytest.mark.parametrize(
    ("checkpoint", "told"), [(7, "3 steps of model0 after its newest checkpoint (step 7)"), (0, "10 steps")]
)
@pytest.mark.parametrize(
    "override",
    [
        "policies.model0.optimizer.lr=5.0e-4",
        "policies.model0.batch.max_staleness=2",
        "run.steps=120",  # the schedule spans the run
    ],
)
def test_a_training_step_does_not_change_while_recorded_batches_are_to_be_trained_again(
    run_dir: Path, override: str, checkpoint: int, told: str
) -> None:
    recipe = begin(run_dir, checkpoint=checkpoint)
    with pytest.raises(ConfigError) as caught:
        with_changes(recipe, run_dir, [override])
    assert told in caught.value.message and "Ctrl-C, which writes a checkpoint" in caught.value.message
    assert override.partition("=")[0] in caught.value.message


@pytest.mark.parametrize("settings", [{"schedule": "constant"}, {"total_updates": 85}])
def test_a_learning_rate_that_is_constant_or_has_its_own_end_does_not_depend_on_the_number_of_steps(
    run_dir: Path, settings: dict[str, str | int]
) -> None:
    recipe = begin(run_dir, checkpoint=7)
    tree = recipe.model_dump(mode="json")
    tree["policies"]["model0"]["optimizer"].update(settings)
    assert with_changes(Recipe.model_validate(tree), run_dir, ["run.steps=120"])[0].run.steps == 120


def test_before_a_run_has_begun_only_its_name_and_place_are_fixed(run_dir: Path) -> None:
    changed, _ = with_changes(load_resolved(run_dir), run_dir, ["run.seed=2", "rollout.group_size=4"])
    assert (changed.run.seed, changed.rollout.group_size) == (2, 4)
    with pytest.raises(ConfigError, match="move its directory"):
        with_changes(load_resolved(run_dir), run_dir, ["run.dir=/elsewhere"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("workflow.settings.reward=recipes.quickstart.reward:nothing", "'nothing'"),
        ("run.steps=many", "run.steps"),
    ],
)
def test_a_wrong_change_is_refused_as_in_a_new_run_and_nothing_is_written(
    run_dir: Path, override: str, told: str
) -> None:
    begin(run_dir)
    before = (run_dir / "recipe.json").read_bytes()
    done = CliRunner().invoke(app, ["run", "--resume", str(run_dir), "--set", override])
    assert isinstance(done.exception, ConfigError) and told in done.exception.message
    assert (run_dir / "recipe.json").read_bytes() == before and not (run_dir / "recipe.changes.jsonl").exists()
