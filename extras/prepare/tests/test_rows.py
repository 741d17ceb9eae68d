"""Rows of several inputs in one file: rStar2's two column layouts, and programming problems without those that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extras.prepare.rows import prepare_code, process_train_dataset
from services.common.config.envgateway import SandboxConfig
from services.common.errors import DatasetError

CHAT = {"prompt": [{"role": "user", "content": "What is 2+2?"}], "reward_model": {"ground_truth": 4, "style": "rule"}}
PLAIN = {"problem": "What is 3+3?", "answer": "6"}


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_both_layouts_become_one(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", CHAT, {"problem": "?", "answer": None})
    second = written(tmp_path / "b.jsonl", PLAIN)
    done = process_train_dataset([first, second], tmp_path / "out" / "train.jsonl")
    assert (done.num_rows, [left_out.count for left_out in done.left_out.values()]) == (2, [1, 0])
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert rows == [{"problem": "What is 2+2?", "answer": "4"}, {"problem": "What is 3+3?", "answer": "6"}]


def test_without_a_row_of_either_layout_the_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", {"problem": "?"}, {"text": "?"})
    with pytest.raises(
        DatasetError, match=r"a\.jsonl holds no row that can be used \(2 looked at\): row 1: no answer.*; row 2"
    ):
        process_train_dataset([source], tmp_path / "train.jsonl")
    assert not list(tmp_path.glob("train.jsonl*"))


def test_a_subset_of_a_hub_dataset_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    hub.mkdir()
    written(hub / "all.jsonl", PLAIN, {"problem": "3+4?", "answer": "7"})
    written(hub / "en.jsonl", PLAIN)
    card = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("all", "en"))
    (hub / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    for subset, rows in (("all", 2), ("en", 1)):
        assert process_train_dataset([str(hub)], tmp_path / "out.jsonl", subset).num_rows == rows
    with pytest.raises(DatasetError, match="--subset en"):
        process_train_dataset([written(tmp_path / "a.jsonl", PLAIN)], tmp_path / "out.jsonl", "en")


PROBLEMS = [
    {"problem": "right", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 21\ncheck(f)"}},
    {"problem": "wrong value", "solution": "def f(n): return n * 7", "tests": {"functional": "def check(fn):\n    assert fn(3) == 22\ncheck(f)"}},
    {"problem": "no Python", "solution": "def f(n): return n", "tests": {"functional": "def check(fn):\n    assert fn(3 == 22\ncheck(f)"}},
    {"problem": "no solution", "tests": [{"input": "1", "output": "1"}]},
    {"problem": "a class of its own", "solution": "class Pair:\n  def __init__(self, a): self.a = a\ndef total(p): return p.a", "test_list": ["assert total(Pair(3)) == 3"]},
    {"problem": "opaque", "solution": "def f(g): return g(3)", "tests": {"functional": "def twice(x): return 2 * x\nassert f(twice) == 6"}},
    {"problem": "stdin, wrong", "solution": "print(2)", "tests": [{"input": "1", "output": "1"}]},
]  # fmt: skip


@pytest.mark.needs("isolating sandbox")
def test_rows_that_fail_their_own_solution_are_not_written(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", *PROBLEMS)
    sandbox = SandboxConfig(num_slots=2, prewarm_scientific=False)
    done = prepare_code([rows], tmp_path / "out" / "clean.jsonl", sandbox, None)
    kept = [json.loads(line)["problem"] for line in (tmp_path / "out" / "clean.jsonl").read_text().splitlines()]
    assert kept == ["right", "no solution", "a class of its own", "opaque"] and done.num_rows == 4
    assert done.left_out[rows].count == 1 and "row 3" in str(done.left_out[rows])
    report = done.solutions[rows]
    assert (report.num_passed, report.num_without, report.failed.count) == (3, 1, 2)
    reasons = report.failed.reasons
    assert reasons[0].startswith("row 2:") and "expected 22, got 21" in reasons[0]
    assert reasons[1].startswith("row 7:") and "WRONG_ANSWER" in reasons[1]
    assert not list((tmp_path / "out").glob("*.partial"))
