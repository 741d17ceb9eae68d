"""``rollmill new``: the files are a valid recipe with a reward and rows, wherever the folder is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.check.recipe import check_recipe
from services.common.config.data import is_training
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.orchestrator.tasks.datasets import open_source

ROWS = ["--model", "a/b", "--data", "rows.jsonl"]


def new(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["new", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_new_folder_holds_a_recipe_that_check_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = new("mine")
    files = {path.name for path in (tmp_path / "mine").iterdir()}
    assert files == {"recipe.yaml", "rewards.py", "demo.py", "train.jsonl", "held_out.jsonl", "README.md"}
    assert all(f"mine/{name}" in told for name in files)
    recipe = load_recipe(tmp_path / "mine", (), {})
    assert (recipe.name, recipe.modules) == ("mine", [str(tmp_path / "mine")])
    check_recipe(recipe)


def test_the_output_names_the_next_three_commands(tmp_path: Path) -> None:
    told = new(str(tmp_path / "mine")).partition("next:")[2]
    commands = [line.split("#")[0].split()[:2] for line in told.strip().splitlines()]
    assert commands == [["rollmill", "check"], ["rollmill", "run"], ["rollmill", "trajectories"]]


def test_no_held_out_row_is_trained_on(tmp_path: Path) -> None:
    new(str(tmp_path / "mine"))
    train, held_out = (
        {json.loads(line)["problem"] for line in (tmp_path / "mine" / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert len(train) == 600 and len(held_out) == 120 and not train & held_out


def test_the_starting_model_is_right_once_in_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new(str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    dialogues = load_object("demo:dialogues")(seed=1)
    asked = [next(dialogues)["messages"] for _ in range(900)]
    right = sum(str(max(m[0]["content"][11:-1].split())) == m[1]["content"] for m in asked)
    assert 200 < right < 400


def test_an_own_model_and_own_rows_need_no_demo(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,solution\n1+1?,2\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 1024}')
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "rows.csv")]
    new(str(tmp_path / "mine"), *arguments, "--prompt", "question", "--answer", "solution")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"recipe.yaml", "rewards.py", "README.md"}
    recipe = load_recipe(tmp_path / "mine", (), {})
    assert recipe.policies["model0"].model.path == str(tmp_path / "model")
    assert recipe.policies["model0"].model.context_length == 1024
    assert recipe.data.train.path == str(tmp_path / "rows.csv")
    assert recipe.data.train.columns == {"prompt": "question", "answer": "solution"}
    assert recipe.warm_start == {}


@pytest.mark.parametrize(
    ("folder", "arguments", "told"),
    [
        ("full", [], "is not empty"),
        ("my run", [], "use letters, digits"),
        ("file/mine", [], "cannot be written"),
        ("mine", ["--model", "./nowhere"], "./nowhere does not exist"),
        ("mine", ["--data", "Qwen/rows"], "--data needs --model"),
        ("mine", ["--model", "a/b", "--data", "/nowhere/rows.csv"], "/nowhere/rows.csv does not exist"),
        ("mine", [*ROWS, "--prompt", "text", "--answer", "total"], "columns.answer is 'total', which the row lacks"),
        ("mine", ROWS, "row 1 has no prompt: looked for messages, prompt, problem, question in"),
        ("mine", ["--model", "a/b", "--data", "empty.jsonl"], "holds no rows"),
    ],
)
def test_what_cannot_be_made_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "1 plus 1", "sum": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError) as caught:
        new(str(tmp_path / folder), *arguments)
    assert told in caught.value.message
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "empty.jsonl", "file", "full", "notes.txt", "rows.jsonl",
    ]  # fmt: skip


def test_a_part_of_own_rows_is_held_out_and_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(5000)))
    told = new(str(tmp_path / "mine"), "--model", "a/b", "--data", str(rows))
    assert "200 of 5,000 rows are held out for evaluation: one row in 25 (hold_out: 25)" in told
    recipe = load_recipe(tmp_path / "mine", (), {})
    problems = {
        where: {task.data["problem"] for task in map(source.__getitem__, range(len(source)))}
        for where, config in recipe.data.sections().items()
        for source in [open_source(config, 0, evaluates=not is_training(where))]
    }
    assert len(problems["data.train"]) == 4800 and len(problems["data.evaluation.held_out"]) == 200
    assert not problems["data.train"] & problems["data.evaluation.held_out"]
    assert recipe.evaluation.every == 20


def test_too_few_rows_are_not_split_and_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n' * 60)
    told = new(str(tmp_path / "mine"), "--model", "a/b", "--data", str(tmp_path / "rows.jsonl"))
    assert "60 rows are too few to hold some out" in told
    assert load_recipe(tmp_path / "mine", (), {}).data.evaluation == {}
