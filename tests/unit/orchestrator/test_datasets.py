from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.orchestrator.datasets import open_source


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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"q": 1}', '{"q": '], r"a\.jsonl, row 2: not valid JSON"),
        (['{"q": 1}', "[1]"], r"a\.jsonl, row 2: a row must be a JSON object, not list"),
        ([], r"holds no rows"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        open_source(jsonl(tmp_path / "a.jsonl", *lines), seed=0)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        open_source(DatasetConfig(path="/nowhere/a.jsonl"), seed=0)


def test_ids_come_from_their_field_and_are_unique(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", '{"id": "x"}', '{"id": "y"}').model_copy(update={"id_field": "id"})
    assert open_source(config, seed=0)[1].task_id == "y"
    config = jsonl(tmp_path / "b.jsonl", '{"id": "x"}', '{"id": "x"}').model_copy(update={"id_field": "id"})
    with pytest.raises(DatasetError, match="row 2: id 'x' was used in row 1"):
        open_source(config, seed=0)
    config = jsonl(tmp_path / "c.jsonl", '{"name": "x"}').model_copy(update={"id_field": "id"})
    with pytest.raises(DatasetError, match="no field 'id'"):
        open_source(config, seed=0)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", '{"q": 1}', '{"q": 2}', "broken").model_copy(update={"limit": 2})
    assert len(open_source(config, seed=0)) == 2


def test_a_generator_gets_seed_and_settings() -> None:
    config = DatasetConfig(generator=f"{__name__}:rows", settings={"count": 2}, id_field="id")
    source = open_source(config, seed=7)
    assert [source[i].task_id for i in range(len(source))] == ["7-0", "7-1"]


def test_faulty_generators_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match="unexpected keyword"):
        open_source(DatasetConfig(generator=f"{__name__}:rows", settings={"size": 2}), seed=7)
    with pytest.raises(DatasetError, match="row 1: cannot be written as JSON"):
        open_source(DatasetConfig(generator=f"{__name__}:no_json"), seed=7)
    monkeypatch.setattr("services.orchestrator.datasets.MAX_GENERATED_ROWS", 10)
    with pytest.raises(DatasetError, match="set `limit`"):
        open_source(DatasetConfig(generator=f"{__name__}:endless"), seed=7)
    assert len(open_source(DatasetConfig(generator=f"{__name__}:endless", limit=5), seed=7)) == 5


@pytest.mark.slow
def test_a_saved_hugging_face_dataset_is_opened(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"question": "a"}, {"question": "b"}]).save_to_disk(str(tmp_path / "saved"))
    source = open_source(DatasetConfig(path=str(tmp_path / "saved")), seed=0)
    assert [json.loads(json.dumps(source[i].data)) for i in range(2)] == [{"question": "a"}, {"question": "b"}]
    with pytest.raises(DatasetError, match="cannot be loaded"):
        open_source(DatasetConfig(path=str(tmp_path / "nothing-here")), seed=0)
