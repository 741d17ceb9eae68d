"""Finds evaluation tasks in the training data, and no merely similar ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.check.data import LONG, MAX_TEMPLATE, SHORT, find_overlap, text_of, words_of
from services.cli.check.recipe import check_recipe
from services.common.config.loading import load_recipe
from services.common.records import Task

Matches = list[tuple[str, str, float, bool]]


def found(training: list[str], evaluation: list[str], **bounds: int) -> Matches:
    """(evaluation task, training task, share, equal), by numbers from 0."""
    overlaps, _ = find_overlap(numbered(training), {"d": numbered(evaluation)}, **bounds)
    return [(m.task_id, m.training_task_id, round(m.share, 3), m.equal) for m in overlaps["d"].matches]


def numbered(texts: list[str]) -> list[tuple[str, str]]:
    return [(str(number), text) for number, text in enumerate(texts)]


def words(count: int, prefix: str = "w") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_equal_texts_are_found_whatever_their_case_punctuation_and_length() -> None:
    assert found(["What is 2+2 ?", "other"], ["what is $2 + 2$", "what is 2 + 3"]) == [("0", "0", 1.0, True)]


def test_short_texts_take_shorter_runs_and_the_shortest_must_be_equal() -> None:
    short, shortest = words(SHORT), words(SHORT - 1)
    assert found([" ".join(["a", *short, "b"])], [" ".join(short)]) == [("0", "0", 1.0, False)]
    assert found([" ".join(["a", *shortest, "b"])], [" ".join(shortest)]) == []
    assert found([" ".join(shortest)], [" ".join(shortest)]) == [("0", "0", 1.0, True)]


def test_a_template_of_the_evaluation_tasks_is_no_overlap_but_an_equal_text_is() -> None:
    tasks = [" ".join([*words(30), f"number {number}"]) for number in range(MAX_TEMPLATE + 2)]
    training = [" ".join([*words(30), f"number {number}"]) for number in (3, 77)]
    assert found(training, tasks) == [("3", "0", 1.0, True)]
    few = tasks[:MAX_TEMPLATE]
    assert len(found(training, few)) == MAX_TEMPLATE, "so many may be versions of one task"


def test_a_task_that_an_evaluation_repeats_is_told_each_time() -> None:
    task = " ".join(words(20))
    assert found([task], [task, "another", task]) == [("0", "0", 1.0, True), ("2", "0", 1.0, True)]


def test_what_lies_beyond_the_bounds_is_not_looked_at_and_counted() -> None:
    tasks = numbered([" ".join(words(20, letter)) for letter in "abcd"])
    overlaps, num_read = find_overlap(tasks, {"d": tasks}, max_training_words=45)
    assert (num_read, len(overlaps["d"].matches), overlaps["d"].num_unread) == (2, 2, 0)
    overlaps, num_read = find_overlap(tasks, {"d": tasks}, max_evaluation_words=60)
    assert (num_read, len(overlaps["d"].matches), overlaps["d"].num_unread) == (4, 3, 1)


def naive(training: list[str], task: str) -> float:
    """The greatest share of a task's words that stand in runs of one training task, by trying all."""
    own = words_of(task)
    run = LONG if len(own) >= LONG else SHORT
    if len(own) < SHORT:
        return 0.0
    shares = []
    for text in map(words_of, training):
        runs = {tuple(text[i : i + run]) for i in range(len(text) - run + 1)}
        covered = {i + j for i in range(len(own) - run + 1) if tuple(own[i : i + run]) in runs for j in range(run)}
        shares.append(len(covered) / len(own))
    return max(shares, default=0.0)


@given(st.integers(0, 10**6))
def test_the_index_finds_what_a_comparison_of_every_pair_finds(seed: int) -> None:
    """Texts put together of a few sentences, so that many pairs have runs in common."""
    draw = random.Random(seed)
    sentences = [" ".join(draw.choices(words(30), k=draw.randint(3, 20))) for _ in range(6)]
    made = [" ".join(draw.choices(sentences, k=draw.randint(1, 4))) for _ in range(10)]
    training, evaluation = made[:6], made[6:]
    overlaps, _ = find_overlap(numbered(training), {"d": numbered(evaluation)})
    told = {int(m.task_id): m.share for m in overlaps["d"].matches}
    for number, task in enumerate(evaluation):
        equal = words_of(task) in map(words_of, training)
        share = 1.0 if equal else naive(training, task)
        assert told.get(number, 0.0) == pytest.approx(share if share >= 0.5 else 0.0)


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
    path.write_text(
        yaml.safe_dump(
            {
                "name": "checked",
                "policies": {
                    "model0": {"model": {"path": "org/model"}, "trainer": {"port": 0}, "weights": {"port": 0}}
                },
                "data": {
                    "train": {"path": "./train.jsonl"},
                    "evaluation": {name: {"path": f"./{name}.jsonl"} for name in ("seen", "unseen")},
                },
                "workflow": {"name": "single_turn", "settings": {"reward": "math"}},
                "orchestrator": {"port": 0},
                "inference": {"a": {"port": 0}},
                "envgateway": {"port": 0},
            }
        )
    )
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
