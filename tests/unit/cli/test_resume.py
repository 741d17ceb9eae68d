"""``--resume auto``: the run that a launch continues, and the messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.run.directory import choose, differences, prepare
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "recipes/quickstart"


def quickstart(runs: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"run.dir={runs}", *overrides], {})


def begun(recipe: Recipe, name: str, at: float) -> Path:
    """The directory of a run that was begun at a time."""
    _, directory = prepare(recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": name})}))
    os.utime(directory / "recipe.json", (at, at))
    return directory


def end(run_dir: Path, state: str) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"state": state}))


def test_without_being_asked_each_launch_is_a_new_run(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    begun(recipe, "first", 1)
    assert choose(recipe, asked=False) == (None, "")


@pytest.mark.parametrize("asked", [True, False], ids=["--resume auto", "run.resume: auto"])
def test_the_newest_run_that_has_not_ended_goes_on(tmp_path: Path, asked: bool) -> None:
    recipe = quickstart(tmp_path, *(() if asked else ("run.resume=auto",)))
    begun(recipe, "old", 1)
    newest = begun(recipe, "new", 3)
    end(begun(recipe, "finished", 4), "finished")
    end(begun(recipe, "stopped", 5), "stopped")
    run_dir, told = choose(recipe, asked=asked)
    assert run_dir == newest
    assert "the newest run of quickstart that has not ended" in told and "\n" not in told
    assert ("--resume auto" if asked else "run.resume: auto") in told


def test_without_any_a_new_one_begins_and_says_so(tmp_path: Path) -> None:
    run_dir, told = choose(quickstart(tmp_path / "none"), asked=True)
    assert run_dir is None and f"there is none in {tmp_path / 'none'}" in told
    end(begun(quickstart(tmp_path), "done", 1), "finished")
    assert f"{tmp_path / 'done'} is over (finished)" in choose(quickstart(tmp_path), asked=True)[1]


def test_a_run_with_other_settings_is_left_alone_and_the_setting_named(tmp_path: Path) -> None:
    begun(quickstart(tmp_path, "run.steps=7"), "other", 1)
    run_dir, told = choose(quickstart(tmp_path, "run.steps=8"), asked=True)
    assert run_dir is None
    assert f"{tmp_path / 'other'} is left alone: run.steps is 7 there and 8 here" in told


def test_what_a_launch_filled_in_is_no_other_setting(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    resolved, _ = prepare(recipe)
    assert recipe.orchestrator.port == 0 and resolved.orchestrator.port != 0
    assert differences(resolved, recipe) == []
    tree: dict[str, Any] = resolved.model_dump(mode="json")
    tree["orchestrator"]["host"] = "192.0.2.7"  # as over several nodes
    assert differences(Recipe.model_validate(tree), recipe) == []
    wanted = quickstart(tmp_path, "orchestrator.port=50051")
    assert [line.partition(" ")[0] for line in differences(resolved, wanted)] == ["orchestrator.port"]


def test_passwords_are_not_told(tmp_path: Path) -> None:
    uri = "envgateway.queue.redis_uri=redis://me:{}@{}:6379"
    there, here = (quickstart(tmp_path, uri.format("secret", host)) for host in ("one", "two"))
    assert differences(there, here) and "secret" not in str(differences(there, here))


def test_damaged_and_foreign_directories_are_skipped_with_the_reason(tmp_path: Path) -> None:
    recipe = quickstart(tmp_path)
    good = begun(recipe, "good", 1)
    begun(recipe, "copied", 2).rename(tmp_path / "copy")
    for name, text in (("quickstart-half", '{"name": "quicks'), ("quickstart-other", '{"name": "quickstart", "a": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(text)
    (tmp_path / "quickstart-empty").mkdir()
    begun(load_recipe(REPOSITORY / "recipes/quickstart-code", [f"run.dir={tmp_path}"], {}), "another-recipe", 9)
    assert choose(recipe, asked=True)[0] == good
    end(good, "finished")
    told = choose(recipe, asked=True)[1]
    assert f"{tmp_path / 'copy'} is left alone: its recipe.json is that of run copied" in told
    assert "quickstart-half is left alone: " in told and "recipe.json cannot be read (Unterminated string" in told
    assert "quickstart-other is left alone: " in told and "recipe.json cannot run: " in told
    assert "another-recipe" not in told and "quickstart-empty" not in told and "\n" not in told


def test_a_recipe_that_names_its_run_goes_on_with_that_one_alone(tmp_path: Path) -> None:
    mine = begun(quickstart(tmp_path), "mine", 1)
    begun(quickstart(tmp_path), "newer", 2)
    assert choose(quickstart(tmp_path, "run.id=mine"), asked=True)[0] == mine


@pytest.mark.parametrize("arguments", [[str(QUICKSTART), "--resume", "here"], ["--resume", "auto"], []])
def test_a_recipe_and_a_run_directory_at_once_and_neither_are_refused(arguments: list[str]) -> None:
    error = CliRunner().invoke(app, ["run", *arguments]).exception
    assert isinstance(error, ConfigError) and "name a recipe to start a run" in error.message
