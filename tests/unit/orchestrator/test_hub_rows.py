"""Rows of every dataset on the hub, in their true form, become tasks: from a local file and through ``datasets``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import DatasetConfig
from services.orchestrator.tasks.datasets import TaskSource, open_source
from services.orchestrator.tasks.rows import KNOWN
from tests.hub_rows import COLUMNS, RIGHT, ROWS, rows_of

PROGRAMS = ("deepcoder-primeintellect", "deepcoder-codeforces", "humaneval", "livecodebench-v5")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    return tmp_path


def local(root: Path, name: str) -> TaskSource:
    path = root / KNOWN[name].local
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROWS / f"{name}.jsonl", path)
    return open_source(DatasetConfig(name=name), seed=0)


def data_of(source: TaskSource) -> list[dict[str, Any]]:
    return [dict(source[place].data) for place in range(len(source))]


def test_every_dataset_on_the_hub_has_rows_here() -> None:
    fetched = {name for name, entry in KNOWN.items() if entry.hub is not None or entry.fetch}
    assert fetched == {path.stem for path in ROWS.glob("*.jsonl")} == COLUMNS.keys() == RIGHT.keys()


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_rows_become_tasks(root: Path, name: str) -> None:
    assert all(list(row) == COLUMNS[name].split() for row in rows_of(name))
    source = local(root, name)
    assert len(source) == len(RIGHT[name])
    assert source.left_out.count == len(rows_of(name)) - len(source) == (3 if name == "deepcoder-primeintellect" else 0)
    truth = "tests" if name in PROGRAMS else "answer"
    assert all(data["problem"] and data[truth] for data in data_of(source))


@pytest.mark.parametrize("name", sorted(name for name, entry in KNOWN.items() if entry.hub is not None))
def test_the_hub_is_asked_for_the_dataset_its_subset_and_split(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, subset: str | None, *, split: str) -> Any:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(rows_of(name))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source(DatasetConfig(name=name), seed=0)
    entry = KNOWN[name]
    assert asked == [(entry.hub, entry.subset, entry.split)]
    assert data_of(source) == data_of(local(root, name))


def test_another_subset_may_be_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_list(rows_of("dapo-math-17k"))
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, *, split: rows if subset == "en" else None)
    assert len(open_source(DatasetConfig(name="dapo-math-17k", subset="en"), seed=0)) == 2


def test_rows_of_deepcoder_say_how_their_programs_are_called(root: Path) -> None:
    source = local(root, "deepcoder-primeintellect")
    tests = [data["tests"] for data in data_of(source)]
    assert [(found["kind"], found.get("entry_point")) for found in tests] == [
        ("stdin", None), ("call", "shout"), ("call", "Solution().ends"), ("call", "half"),
    ]  # fmt: skip
    assert tests[1]["cases"] == [
        {"args": ["abc"], "expected": "ABC!", "also": [["ABC!"]]}, {"args": ["7"], "expected": "7!", "also": [["7!"]]},
    ]  # fmt: skip
    assert tests[2]["cases"][0] == {"args": [[3, 1, 2]], "expected": [1, 3]}
    assert [case["expected"] for case in tests[3]["cases"]] == [4, -2]
    no_name, no_cases, too_large = source.left_out.reasons
    assert no_name.startswith("row 5, tests: the cases call a function and do not name it")
    assert no_cases.startswith("row 6, tests: neither pairs")
    assert too_large.startswith("row 7: cannot be written as JSON")


def test_rows_of_livecodebench_pass_one_argument_per_line(root: Path) -> None:
    _, total, repeated = (data["tests"] for data in data_of(local(root, "livecodebench-v5")))
    assert total["entry_point"] == "Solution().total"
    assert total["cases"] == [{"args": [[1, 2, 3]], "expected": 6}, {"args": [[]], "expected": 0}]
    assert repeated["cases"] == [{"args": ["ab", 2], "expected": "abab"}, {"args": ["x", 0], "expected": ""}]


def test_instructions_are_taken_off_the_prompts_of_filtered_dapo_data(root: Path) -> None:
    assert [data["problem"] for data in data_of(local(root, "dapo-filter"))] == [
        "How many positive divisors has $36$?",
        "Find the remainder of $2^{10}$ divided by $7$.",
    ]
