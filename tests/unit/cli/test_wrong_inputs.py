"""Every wrong input of the table is told by ``rollmill check``, with the key and the remedy."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from rich.console import Console

from services.cli.check import models as hub
from services.cli.check import models as trials
from services.cli.check.models import check_model_name, hub_problems, look_up, model_problems, model_trials
from services.cli.check.recipe import check_recipe, describe
from services.common.config.loading import load_recipe, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from tests.unit.cli.hub_server import answering
from tests.unit.cli.wrong_inputs import MIXTURES, WRONG, Wrong, write_good
from tests.unit.trainer_service.building import recipe, save_model

ALL = [*WRONG, *MIXTURES]


@pytest.fixture(scope="module")
def hub_address() -> Iterator[str]:
    """Of a hub that knows no name, and is away for one of them."""
    with answering(lambda name: 503 if "away" in name else 404) as (url, _):
        yield url


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_good(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path, hub_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the good recipe; its modules are forgotten afterwards."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub_address)
    monkeypatch.setattr("services.common.importing._directories", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Without the environments that `make sglang-env` and `make vllm-env` put beside the sources.
    monkeypatch.setattr("services.inference.engine.served.process.ROOT", tmp_path)
    monkeypatch.delenv("ROLLMILL_SGLANG_PYTHON", raising=False)
    monkeypatch.delenv("ROLLMILL_VLLM_PYTHON", raising=False)
    hub._ask.cache_clear()
    hub._unreachable.clear()
    place = tmp_path / "mine"
    shutil.copytree(good, place)
    monkeypatch.chdir(tmp_path)
    yield place
    for name in [name for name, module in sys.modules.items() if str(place) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    hub._ask.cache_clear()
    hub._unreachable.clear()


def apply(folder: Path, wrong: Wrong) -> None:
    file = folder / "recipe.yaml"
    tree = yaml.safe_load(file.read_text())
    for path, value in wrong.settings.items():
        below = tree
        *above, last = path.split(".")
        for key in above:
            below = below.setdefault(key, {})
        below[last] = value
    text = yaml.safe_dump(tree, sort_keys=False)
    file.write_text(wrong.edit(text) if wrong.edit else text)
    for name, content in wrong.files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def checked(folder: Path, wrong: Wrong) -> str:
    """The output of ``rollmill check``: the error, or the description with its yellow lines."""
    try:
        recipe = load_recipe(folder, wrong.overrides, {})
        told = check_recipe(recipe)
    except ConfigError as error:
        return error.message
    output = io.StringIO()
    Console(file=output, width=10_000).print(describe(recipe, told))
    return output.getvalue()


def test_the_good_recipe_passes_and_shows_its_first_row(folder: Path) -> None:
    shown = checked(folder, Wrong("good", ()))
    assert "mine is ready to run: 100 training steps" in shown
    assert "first row as a prompt of 24 tokens" in shown and "What is 0 plus 0?" in shown
    assert "first row scored by my_rewards:exact: 0 for an empty answer, 1 for the row's own answer" in shown


def test_check_shows_a_row_of_each_source(folder: Path) -> None:
    (folder / "other.jsonl").write_text('{"problem": "Spell cat", "answer": "c a t"}\n')
    own = {"path": "./other.jsonl", "weight": 2, "workflow": {"settings": {"reward": "my_rewards:words"}}}
    apply(folder, Wrong("mixture", (), {"data.train": [{"path": "./rows.jsonl"}, own]}))
    shown = checked(folder, Wrong("mixture", ()))
    assert "first row of rows as a prompt of 24 tokens" in shown and "What is 0 plus 0?" in shown
    assert "first row of other as a prompt" in shown and "Spell cat" in shown
    assert "first row of rows scored by my_rewards:exact" in shown
    assert "first row of other scored by my_rewards:words: 0 for an empty answer, 3 for the row's own answer" in shown


@pytest.mark.parametrize(
    ("reward", "scored", "is_told"),
    [
        ("boxed", "0 for an empty answer, 0 for the row's own answer, 1 for the same in a box", False),
        ("never", "0 for an empty answer, 0 for the row's own answer, 0 for the same in a box", True),
        ("number", "0 for an empty answer, 0 for the row's own answer", True),  # raises for a box
    ],
)
def test_a_reward_that_a_right_answer_does_not_raise_is_told(
    reward: str, scored: str, is_told: bool, folder: Path
) -> None:
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": f"my_rewards:{reward}"}))
    shown = checked(folder, Wrong("reward", ()))
    assert f"first row scored by my_rewards:{reward}: {scored}\n" in re.sub(" +\n", "\n", shown)
    assert ("no more than an empty one: call the function" in shown) is is_told


TOLD = "gives the row's own answer no more than an empty one"


@pytest.mark.parametrize(
    ("reward", "answer", "shown"),
    [
        ("boxed", "So 8 + 9.\n#### 17", r"\boxed{17}"),
        ("boxed", 12.0, r"\boxed{12}"),
        ("boxed", "12", None),
        ("boxed", "Paris", None),
        ("math", "12", None),
        ("math", "$12$", None),
    ],
)
def test_a_built_in_reward_that_the_rows_own_answer_does_not_raise_is_told(
    reward: str, answer: Any, shown: str | None, folder: Path
) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"problem": "Add 8 and 9.", "answer": answer}) + "\n")
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": reward}))
    told = checked(folder, Wrong("reward", ()))
    assert ("is ready to run" in told, TOLD in told) == (True, shown is not None), told
    assert shown is None or repr(shown)[1:-1] in told


def test_later_rows_and_answers_of_several_words_are_told(folder: Path) -> None:
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": "boxed"}))
    for answers, expected in ((("12", *["so #### 12"] * 9), TOLD), (("The answer is 12.",), "write the value alone")):
        rows = [json.dumps({"problem": "Add 8 and 9.", "answer": answer}) + "\n" for answer in answers]
        (folder / "rows.jsonl").write_text("".join(rows))
        assert expected in checked(folder, Wrong("reward", ()))


@pytest.mark.needs("isolating sandbox")
@pytest.mark.parametrize(("solution", "is_told"), [("print(input())", False), ("print(1)", True), (None, False)])
def test_a_solution_that_fails_its_own_tests_is_told(solution: str | None, is_told: bool, folder: Path) -> None:
    tests = {"kind": "stdin", "cases": [{"stdin": "5", "expected": "5"}]}
    (folder / "rows.jsonl").write_text(json.dumps({"problem": "Echo.", "tests": tests, "solution": solution}) + "\n")
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": "code"}))
    told = checked(folder, Wrong("reward", ()))
    assert ("is ready to run" in told, TOLD in told) == (True, is_told), told


def test_tools_that_run_in_the_replica_need_no_gateway(folder: Path) -> None:
    settings = {"tools": ["own_tool:Look"], "reward": "own_tool:score"}
    tool = """
class Look:
    name, description, parameters = "look", "Looks.", {"type": "object", "properties": {}}
    async def call(self): return "nothing"
def score(task, completion): return float(completion.strip() == task["answer"])
"""
    own = Wrong(
        "own tool",
        (),
        {"workflow": {"name": "tool_use", "settings": settings}, "envgateway": None},
        {"own_tool.py": tool},
    )
    apply(folder, own)
    assert "which the environment gateway computes" not in checked(folder, own)
    apply(folder, Wrong("code", (), {"workflow": {"name": "tool_use", "settings": settings | {"format": "code"}}}, {}))
    assert "workflow.settings.format: code, which the environment gateway computes" in checked(folder, own)


@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_a_wrong_input_is_told_with_key_and_remedy(folder: Path, wrong: Wrong) -> None:
    apply(folder, wrong)
    shown = checked(folder, wrong)
    assert [part for part in wrong.told if part not in shown] == [], shown


# --- models: files, trials by the config alone, names of the hub

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
