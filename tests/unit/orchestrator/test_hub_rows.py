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
