"""Finds evaluation tasks in the training data, and no merely similar ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.check.data import MAX_TEMPLATE, RUN, find_overlap, text_of, words_of
from services.cli.check.recipe import check_recipe
from services.common.config.loading import load_recipe
from services.common.records import Task
from tests.unit.cli.wrong_inputs import GOOD

Matches = list[tuple[str, str, float]]


def found(training: list[str], evaluation: list[str]) -> Matches:
    """(evaluation task, training task, share), by numbers from 0."""
    overlaps = find_overlap(numbered(training), {"d": numbered(evaluation)})
    return [(seen.task_id, seen.training_task_id, round(seen.share, 3)) for seen in overlaps["d"]]


def numbered(texts: list[str]) -> list[tuple[str, str]]:
    return [(str(number), text) for number, text in enumerate(texts)]


def words(count: int, prefix: str = "w") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_equal_texts_are_found_whatever_their_case_punctuation_length_and_number() -> None:
    assert found(["What is 2+2 ?", "other"], ["what is $2 + 2$", "what is 2 + 3"]) == [("0", "0", 1.0)]
    task = " ".join(words(20))
    assert found([task], [task, "another", task]) == [("0", "0", 1.0), ("2", "0", 1.0)]
    assert found(["", "1"], ["", "2"]) == []


def test_a_task_with_half_of_its_runs_in_one_training_task_is_found() -> None:
    task = words(RUN + 9)  # ten runs
    assert found([" ".join(["a", *task[: RUN + 4], "b"])], [" ".join(task)]) == [("0", "0", 0.5)]
    assert found([" ".join(task[: RUN + 3]), " ".join(task[4 : RUN + 6])], [" ".join(task)]) == []
    assert found([" ".join(["a", *words(RUN - 1), "b"])], [" ".join(words(RUN - 1))]) == [], (
        "shorter ones must be equal"
    )


def test_a_template_of_the_evaluation_tasks_is_no_overlap_but_an_equal_text_is() -> None:
    tasks = [" ".join([*words(30), f"number {number}"]) for number in range(MAX_TEMPLATE + 2)]
    training = [" ".join([*words(30), f"number {number}"]) for number in (3, 77)]
    assert found(training, tasks) == [("3", "0", 1.0)]
    few = tasks[:MAX_TEMPLATE]
    assert len(found(training, few)) == MAX_TEMPLATE, "so many may be versions of one task"


def test_the_text_of_a_task_is_its_prompt_what_the_user_says_or_the_index_of_its_world() -> None:
    def text(**row: object) -> str:
        return text_of(Task(task_id="1", data=row))

    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert (text(problem="2+2?", answer="4"), text(messages=said)) == ("2+2?", "2+2?")
    assert text_of(Task(task_id="1", data={"mine": "2+2?", "problem": "other"}), "mine") == "2+2?"
    assert text(index=3, split="train") == '{"index":3,"split":"train"}'
    assert text(most=100) == "", "what such a row plays is drawn by seed"


def test_words_of_scripts_without_spaces_are_their_characters() -> None:
    assert words_of("求 x+y 的值。") == ["求", "x", "y", "的", "值"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    row, other = {"problem": "Find m+n. " * 5, "answer": "2"}, {"problem": "1+1", "answer": "2"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (other, row)))
    (tmp_path / "seen.jsonl").write_text(
        json.dumps({**row, "answer": "3"}) + "\n" + json.dumps({**row, "problem": "2"})
    )
    (tmp_path / "unseen.jsonl").write_text(json.dumps({**row, "problem": "What?"}))
    path = tmp_path / "recipe.yaml"
    data = {
        "train": {"path": "./train.jsonl"},
        "evaluation": {name: {"path": f"./{name}.jsonl"} for name in ("seen", "unseen")},
    }
    policy = {**GOOD["policies"]["model0"], "model": {"path": "org/model"}}
    math = {"name": "single_turn", "settings": {"reward": "math"}}
    path.write_text(yaml.safe_dump({**GOOD, "policies": {"model0": policy}, "data": data, "workflow": math}))
    return path


def test_check_tells_the_tasks_with_count_share_rows_and_text_and_refuses_nothing(recipe: Path) -> None:
    """Review, defect 14."""
    [line] = check_recipe(load_recipe(recipe))
    assert line.startswith("data.evaluation.seen: 1 of 2 tasks (50.0%) overlap with data.train: 1 word for word; ")
    assert '1 is training task 2: "Find m+n. Find m+n.' in line
    shown = CliRunner().invoke(app, ["check", str(recipe)])
    assert shown.exit_code == 0
    assert "data.evaluation.seen: 1 of 2 tasks" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("absent", "lines"),
    [
        (["train"], ["data.train: not on this machine yet, so it is not known whether evaluation tasks occur in the training data"]),
        (["unseen"], ["data.evaluation.seen: 1 of 2 tasks", "data.evaluation.unseen: not on this machine yet, so it is not known whether its"]),
        (["seen", "unseen"], ["data.evaluation.seen, data.evaluation.unseen: not on this machine yet, so it is not known whether their"]),
    ],
)  # fmt: skip
def test_what_could_not_be_compared_is_told(recipe: Path, absent: list[str], lines: list[str]) -> None:
    sets = [f"data.{'' if name == 'train' else 'evaluation.'}{name}.path=org/{name}" for name in absent]
    found = check_recipe(load_recipe(recipe, sets, {}))
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


def test_generated_training_tasks_are_those_of_the_runs_seed(tmp_path: Path, recipe: Path) -> None:
    """Evaluation rows with the seed of the run's training rows are found; with the same `seed` in both sections they differ."""
    sets = ["data.train.path=null", "data.train.generator=services.common.tiny:sums", "data.train.limit=50"]
    sets += ["data.evaluation.seen.path=null", "data.evaluation.seen.generator=services.common.tiny:sums"]
    sets += ["data.evaluation.seen.limit=50", "run.seed=5", "data.evaluation.seen.seed=5"]
    [line] = check_recipe(load_recipe(recipe, sets, {}))
    assert "50 of 50 tasks (100.0%)" in line
