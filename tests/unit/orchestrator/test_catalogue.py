"""Named datasets open from local files when present, with rows in one form; otherwise the error names the next step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.orchestrator.tasks.datasets import open_source
from services.orchestrator.tasks.rows import KNOWN, UsableRows
from tests.hub_rows import COLUMNS, RIGHT, ROWS, rows_of


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    return tmp_path


def put(root: Path, name: str, *rows: object) -> None:
    path = root / KNOWN[name].local
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_local_file_is_read_and_its_rows_are_in_one_form(root: Path) -> None:
    put(
        root,
        "math500",
        {"problem": "1+1?", "answer": 2},
        {"problem": "?", "answer": None},
        {"question": "2+2?", "answer": 4.0},
    )
    source = open_source(DatasetConfig(name="math500"), seed=0)
    assert source.left_out.reasons == ["row 2: the answer is null; it must be a number or text"]
    assert [(source[n].task_id, dict(source[n].data)) for n in range(len(source))] == [
        ("1", {"problem": "1+1?", "answer": "2"}),
        ("3", {"problem": "2+2?", "answer": "4"}),
    ]


def test_what_must_be_fetched_by_hand_names_path_and_command(root: Path) -> None:
    with pytest.raises(DatasetError) as refused:
        open_source(DatasetConfig(name="livecodebench-v5"), seed=0)
    for wanted in (str(root), "lcb_v5/test.jsonl", "hf download inclusionAI/AReaL-boba-2-RL-Code"):
        assert wanted in refused.value.message


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(DatasetError, match=r"'math-500'.*write one of .*math500"):
        open_source(DatasetConfig(name="math-500"), seed=0)


def test_exactly_one_source_may_be_named() -> None:
    for wrong in ({}, {"path": "a", "name": "gsm8k"}, {"name": "gsm8k", "generator": "a:b"}):
        with pytest.raises(ValueError, match="exactly one"):
            DatasetConfig(**wrong)


def test_alfworld_trains_and_evaluates_on_the_games_of_the_reference(data_root: Path) -> None:
    reference = json.loads((data_root / "alfworld_reference_indices.json").read_text())
    for name, ranges in (("alfworld-train", "train"), ("alfworld-valid", "valid")):
        wanted = [n for first, last in reference[f"{ranges}_ranges_inclusive"] for n in range(first, last + 1)]
        source = open_source(DatasetConfig(name=name), seed=0)
        assert [source[row].data["index"] for row in range(len(source))] == wanted
        assert len(wanted) == reference[f"{ranges}_count"]


# --- rows of every dataset on the hub, in their true form


PROGRAMS = ("deepcoder-primeintellect", "deepcoder-codeforces", "humaneval", "livecodebench-v5")


def local(root: Path, name: str) -> UsableRows:
    path = root / KNOWN[name].local
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROWS / f"{name}.jsonl", path)
    return open_source(DatasetConfig(name=name), seed=0)


def data_of(source: UsableRows) -> list[dict[str, Any]]:
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
