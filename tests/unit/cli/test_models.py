"""The models of a recipe before a run: their files, their trials by the config alone, and names of the hub."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.cli.check import models as hub
from services.cli.check import models as trials
from services.cli.check.models import check_model_name, hub_problems, look_up, model_problems, model_trials
from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from tests.unit.cli.hub_server import answering
from tests.unit.trainer_service.building import recipe, save_model

WHERE = "policies.model0.algorithm.distillation.teacher_model"


def taught(model: Path, teacher: Path | str) -> Any:
    return recipe(
        model,
        algorithm={"name": "reinforce", "distillation": {"teacher_model": str(teacher)}},
        batch={"dynamic_sampling": False},
    )


def test_a_teacher_that_shares_the_tokenizer_is_accepted_and_a_hub_name_is_taken_as_it_is(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    assert model_problems(taught(student, save_model(tmp_path / "teacher", seed=1))) == []
    assert model_problems(taught(student, "org/teacher-8B")) == []


def test_a_broken_directory_of_a_teacher_is_told_with_its_key(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher")
    (teacher / "config.json").unlink()
    assert [problem.split(": ")[0] for problem in model_problems(taught(student, teacher))] == [WHERE]
    assert "no directory" in model_problems(taught(student, tmp_path / "nowhere"))[0]


@pytest.mark.parametrize("named", ["file", "folder", "relative file"])
def test_a_gguf_model_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's a model"
    folder.mkdir()
    file = folder / "small.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(folder)
    path = {"file": str(file), "folder": str(folder), "relative file": file.name}[named]
    (problem,) = model_problems(recipe(Path(path)))
    assert problem.startswith("policies.model0.model.path: ") and "is a GGUF file" in problem


def test_a_model_directory_that_holds_a_gguf_too_is_taken(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (model / "model.gguf").write_bytes(b"GGUF")
    assert model_problems(recipe(model)) == []


def test_a_directory_of_a_run_is_answered_with_its_models_or_the_command_that_makes_one(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "model0" / "step_000003" / "model").mkdir(parents=True)
    (run / "checkpoints" / "model0" / "step_000003" / "model" / "config.json").write_text("{}")
    (run / "recipe.json").write_text("{}")

    def told(path: Path) -> str:
        (problem,) = model_problems(recipe(path))
        return problem

    for path in (run, run / "checkpoints", run / "checkpoints" / "model0" / "step_000003"):
        assert f"`rollmill export {run}` makes of a checkpoint" in told(path)
    half = run / "checkpoints" / "model0" / "step_000003" / "model"
    (half / "tokenizer_config.json").write_text("{}")
    assert "holds no weights" in told(half) and f"rollmill export {run}" in told(half)
    for policy in ("model0", "model1"):
        save_model(run / "export" / policy)
    both = f"write {run}/export/model0 or {run}/export/model1"
    assert both in told(run) and both in told(run / "export")
    (run / "export" / "an-adapter").mkdir()
    (run / "export" / "an-adapter" / "adapter_config.json").write_text("{}")
    assert f"`rollmill export {run}` makes" in told(run / "export" / "an-adapter")
    assert "a Hugging Face model directory or a hub name" in told(tmp_path)
    assert model_problems(recipe(run / "export" / "model0")) == []


# --- trials


def configured(folder: Path, kind: str, **settings: Any) -> Any:
    """A recipe whose model directory holds the config of a big model and no weights."""
    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(folder)
    return recipe(folder)


@pytest.mark.slow
def test_a_big_model_is_tried_by_its_config_alone_and_a_refusal_is_that_of_the_run(tmp_path: Path) -> None:
    """The trainer takes it, and the engine does not. Other refusals: tests/unit/inference/test_engine_models and tests/unit/trainer/test_self_test."""
    problems, notes = model_trials(configured(tmp_path / "model", "Mistral"))
    (problem,) = problems
    assert not notes and "the torch engine cannot run this model: model_type is 'mistral'" in problem


def test_a_model_that_cannot_be_tried_is_told_and_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: Any, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(trials.subprocess, "run", late)
    problems, notes = model_trials(recipe(save_model(tmp_path / "model")))
    assert not problems and all("could not be tried" in note for note in notes) and notes


# --- names of the hub

ANSWERS = {"there/model": 200, "absent/model": 404, "gated/model": 403, "private/model": 401, "broken/model": 500}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The paths that a hub is asked for."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with answering(ANSWERS.__getitem__) as (url, paths):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        hub._ask.cache_clear()
        hub._unreachable.clear()
        yield paths
    hub._ask.cache_clear()
    hub._unreachable.clear()


def hub_recipe(path: str, engine: str = "torch", steps: int = 3) -> Recipe:
    tree = {
        "name": "one",
        "run": {"steps": steps},
        "policies": {"model0": {"model": {"path": path}}},
        "inference": {"a": {"engine": engine}},
        "data": {"train": {"path": "rows.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
    }
    return validate(tree, source="test")


def test_a_name_that_the_hub_has_is_no_problem_and_is_asked_for_once(asked: list[str]) -> None:
    assert [look_up("key", "there/model", "models") for _ in range(3)] == [None] * 3
    assert asked == ["/api/models/there/model"]


@pytest.mark.parametrize("name", ["absent/model", "gated/model", "private/model"])
def test_a_name_that_the_hub_refuses_is_an_error_of_the_recipe(asked: list[str], name: str) -> None:
    problem = look_up("policies.model0.model.path", name, "models")
    assert problem is not None and not problem.of_machine
    assert name in problem.text and str(ANSWERS[name]) in problem.text and "hf auth login" in problem.text
    with pytest.raises(ConfigError, match="--checkpoint"):
        check_model_name("--checkpoint", name)


def test_a_hub_that_is_away_is_asked_once_and_is_a_problem_of_the_machine(asked: list[str]) -> None:
    problems = [look_up("key", name, "models") for name in ("broken/model", "there/model", "absent/model")]
    assert all(problem is not None and problem.of_machine for problem in problems)
    assert len(asked) == 1, "a machine without internet waits once"


def test_offline_no_request_is_made(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem = look_up("key", "there/model", "models")
    assert problem is not None and problem.of_machine and "HF_HUB_OFFLINE is set" in problem.text
    assert asked == []


def test_a_name_in_the_cache_is_not_asked_for(asked: list[str], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--absent--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    assert look_up("key", "absent/model", "models") is None and asked == []


@pytest.mark.parametrize(
    ("engine", "steps", "number"),
    [
        ("torch", 3, 1),
        ("scripted", 3, 1),
        ("scripted", 0, 0),
        ("mine:Engine", 0, 0),
    ],
)
def test_only_models_that_a_process_loads_are_looked_up(asked: list[str], engine: str, steps: int, number: int) -> None:
    hub_problems(hub_recipe("there/model", engine, steps))
    assert len(asked) == number


@pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "~/nowhere"])
def test_paths_are_no_names(asked: list[str], path: str) -> None:
    assert hub_problems(hub_recipe(path)) == [] and asked == []
