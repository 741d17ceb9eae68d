from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.orchestrator.tasks.datasets import open_source

LEAVING: tuple[type[BaseException], ...] = (SystemExit, asyncio.CancelledError, GeneratorExit, ValueError)


def rows(seed: int, count: int = 3) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"id": f"{seed}-{number}", "question": "q"}


def endless(seed: int) -> Iterator[dict[str, Any]]:
    while True:
        yield {"question": "q"}


def no_json(seed: int) -> Iterator[dict[str, Any]]:
    yield {"question": {1, 2}}


def jsonl(path: Path, *lines: str) -> DatasetConfig:
    path.write_text("".join(line + "\n" for line in lines))
    return DatasetConfig(path=str(path))


def test_jsonl_rows_are_numbered_and_empty_lines_are_passed(tmp_path: Path) -> None:
    source = open_source(jsonl(tmp_path / "a.jsonl", '{"q": 1}', "", '{"q": 2}'), seed=0)
    assert len(source) == 2
    assert [(source[i].task_id, source[i].data["q"]) for i in (1, 0)] == [("3", 2), ("1", 1)]


def test_rows_that_cannot_be_used_are_left_out_counted_and_named_by_their_line(tmp_path: Path) -> None:
    lines = ['{"q": 1}', '{"q": ', "", "[1]", "\xff", '{"q": 123456789012345678901}', "7", '{"q": 2}']
    source = open_source(jsonl(tmp_path / "a.jsonl", *lines), seed=0)
    assert [source[place].task_id for place in range(len(source))] == ["1", "8"]
    assert source.left_out.count == 5  # 64 bits do not hold the number of row 6
    assert [reason.partition(":")[0] for reason in source.left_out.reasons] == ["row 2", "row 4", "row 5"]
    assert str(source.left_out).endswith("; and 2 more")
    assert "a row must be a JSON object, not list" in source.left_out.reasons[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{", "[1]", "2", "3", "4"], r"a\.jsonl holds no row that can be used \(5 looked at\): row 1: not valid JSON.*; "
         r"row 2: a row must be a JSON object, not list; row 3: .*; and 2 more"),
        ([], r"a\.jsonl holds no rows"),
    ],
)  # fmt: skip
def test_a_file_without_a_usable_row_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        open_source(jsonl(tmp_path / "a.jsonl", *lines), seed=0)


def test_rows_of_a_file_are_brought_into_the_form_that_is_asked_for(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", '{"question": "1+1?", "answer": 2.0}', '{"question": "?"}')
    source = open_source(config.model_copy(update={"form": "math"}), seed=0)
    assert (dict(source[0].data), len(source)) == ({"problem": "1+1?", "answer": "2"}, 1)
    assert source.left_out.reasons[0].startswith("row 2: no answer")
    with pytest.raises(DatasetError, match="row 1: no tests"):
        open_source(config.model_copy(update={"form": "code"}), seed=0)
    with pytest.raises(ValueError, match="leave form out"):
        DatasetConfig(name="math500", form="math")


def test_ids_come_from_their_field_and_are_unique(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", '{"id": "x"}', '{"id": "y"}').model_copy(update={"id_field": "id"})
    assert open_source(config, seed=0)[1].task_id == "y"
    config = jsonl(tmp_path / "b.jsonl", '{"id": "x"}', '{"id": "x"}', '{"id": "y"}', '{"a": 1}')
    source = open_source(config.model_copy(update={"id_field": "id"}), seed=0)
    assert [source[place].task_id for place in range(len(source))] == ["x", "y"]
    assert source.left_out.reasons[0] == "row 2: id 'x' was used in row 1; task ids must be unique"
    assert "row 4: no field 'id'" in source.left_out.reasons[1]
    config = jsonl(tmp_path / "c.jsonl", '{"name": "x"}').model_copy(update={"id_field": "id"})
    with pytest.raises(DatasetError, match="no field 'id'"):
        open_source(config, seed=0)


def test_a_generator_gets_seed_and_settings() -> None:
    config = DatasetConfig(generator=f"{__name__}:rows", settings={"count": 2}, id_field="id")
    source = open_source(config, seed=7)
    assert [source[i].task_id for i in range(len(source))] == ["7-0", "7-1"]


def test_faulty_generators_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match="unexpected keyword"):
        open_source(DatasetConfig(generator=f"{__name__}:rows", settings={"size": 2}), seed=7)
    with pytest.raises(DatasetError, match="row 1: cannot be written as JSON"):
        open_source(DatasetConfig(generator=f"{__name__}:no_json"), seed=7)
    monkeypatch.setattr("services.orchestrator.tasks.datasets.MAX_GENERATED_ROWS", 10)
    with pytest.raises(DatasetError, match="set `limit`"):
        open_source(DatasetConfig(generator=f"{__name__}:endless"), seed=7)
    assert len(open_source(DatasetConfig(generator=f"{__name__}:endless", limit=5), seed=7)) == 5


@pytest.mark.slow
def test_a_saved_hugging_face_dataset_is_opened(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"question": "a"}, {"question": "b"}]).save_to_disk(str(tmp_path / "saved"))
    source = open_source(DatasetConfig(path=str(tmp_path / "saved")), seed=0)
    assert [json.loads(json.dumps(source[i].data)) for i in range(2)] == [{"question": "a"}, {"question": "b"}]
    with pytest.raises(DatasetError, match="does not exist"):
        open_source(DatasetConfig(path=str(tmp_path / "nothing-here")), seed=0)


def _numbered(seed: int) -> Iterator[dict[str, Any]]:
    yield from ({"problem": f"p{n}", "answer": n} for n in range(1, 401))


@pytest.mark.parametrize("limit", [1, 16, 17, 380, 1000])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json", "generator"])
def test_the_limit_counts_the_rows_that_hold_out_leaves(tmp_path: Path, kind: str, limit: int) -> None:
    rows = list(_numbered(0))
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("problem,answer\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"generator": f"{__name__}:_numbered"} if kind == "generator" else {"path": str(path)}
    config = DatasetConfig(**source, limit=limit, hold_out=20)
    held, kept = (open_source(config, 0, evaluates=evaluates) for evaluates in (True, False))
    found = {name: [int(rows[n].data["answer"]) for n in range(len(rows))] for name, rows in (("h", held), ("k", kept))}
    assert found["h"] == [n for n in range(1, 401) if n % 20 == 0][:limit]
    assert found["k"] == [n for n in range(1, 401) if n % 20][:limit]
