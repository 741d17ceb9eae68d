"""`rollmill check` judges a teacher by the files of two model directories alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.check.models import model_problems
from services.common.config.loading import validate
from tests.unit.trainer_service.building import recipe, save_model

WHERE = "policies.model0.algorithm.distillation.teacher_model"


def taught(model: Path, teacher: Path | str) -> Any:
    return recipe(
        model,
        algorithm={"name": "reinforce", "distillation": {"teacher_model": str(teacher)}},
        batch={"dynamic_sampling": False},
    )


def served(model: Path, teacher: Path | str) -> Any:
    """The same with a teacher that is a policy of the recipe."""
    tree = recipe(model, batch={"dynamic_sampling": False}).model_dump(mode="json")
    tree["policies"]["model0"]["algorithm"] = {"name": "reinforce", "distillation": {"teacher": "teacher"}}
    tree["policies"]["teacher"] = {"trained": False, "model": {"path": str(teacher)}}
    return validate(tree, source="test")


def test_a_teacher_that_shares_the_tokenizer_is_accepted_and_a_hub_name_is_taken_as_it_is(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    assert model_problems(taught(student, save_model(tmp_path / "teacher", seed=1))) == []
    assert model_problems(taught(student, "org/teacher-8B")) == []


def test_a_broken_directory_of_a_teacher_is_told_with_its_key(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher")
    (teacher / "config.json").unlink()
    assert [problem.split(": ")[0] for problem in model_problems(taught(student, teacher))] == [WHERE]
    assert "no directory" in model_problems(taught(student, tmp_path / "nowhere"))[0]


def test_a_served_teacher_is_looked_through_as_the_policy_that_it_is(tmp_path: Path) -> None:
    (problem,) = model_problems(served(save_model(tmp_path / "student"), tmp_path / "nowhere"))
    assert problem.startswith("policies.teacher.model.path: ")


def test_weights_that_are_pickled_are_told_before_a_run_begins(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", seed=1)
    for file in Path(teacher).glob("*.safetensors"):
        file.rename(file.with_name("pytorch_model.bin"))
    (problem,) = model_problems(taught(student, teacher))
    assert "pickled weights only (pytorch_model.bin)" in problem


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
