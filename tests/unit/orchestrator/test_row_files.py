"""Files of rows: CSV, TSV, JSON and JSON Lines, columns by name, and a message for each fault."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.config.data import DatasetConfig
from services.common.dataset_rows import prompt_in
from services.common.errors import DatasetError
from services.orchestrator.tasks.datasets import open_source

ROWS = [{"question": "1+1?", "solution": "2"}, {"question": 'say "a,b"\nand stop', "solution": "é"}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def opened(path: Path, **settings: Any) -> list[dict[str, Any]]:
    source = open_source(DatasetConfig(path=str(path), **settings), 0)
    return [dict(source[row].data) for row in range(len(source))]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".tsv", ".CSV"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"rows{suffix}", ROWS)
    assert opened(file) == ROWS
    assert opened(file, limit=1) == ROWS[:1]


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    columns = {"prompt": "question"}
    assert opened(tmp_path / "rows.parquet", columns=columns) == [{**row, "prompt": row["question"]} for row in ROWS]


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\r\x00")), st.text("ab,\"'\n")), min_size=1
    )
)
def test_a_table_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, str]]
) -> None:
    rows = [{"first": first, "second": second} for first, second in values]
    assert opened(write(tmp_path_factory.mktemp("table") / "rows.csv", rows)) == rows


def test_columns_are_found_by_name_and_within_columns(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "extra": {"answer": {"text": "2"}}, "a.b": 3}]
    columns = {"prompt": "question", "answer": "extra.answer.text", "score": "a.b"}
    found = opened(write(tmp_path / "rows.jsonl", rows), columns=columns)
    assert found == [{**rows[0], "prompt": "1+1?", "answer": "2", "score": 3}]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"prompt": "qestion"}, ("columns.prompt", "'qestion'", "question, solution")),
        ({"answer": "solution.text"}, ("columns.answer", "'solution.text'")),
        ({"question": "solution", "ground_truth": "question"}, ()),
    ],
)
def test_a_column_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, columns: dict[str, str], told: tuple[str, ...]
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    if not told:
        assert opened(file, columns=columns)[0] == {"question": "2", "solution": "2", "ground_truth": "1+1?"} | ROWS[
            0
        ] | {"question": "2"}
        return
    with pytest.raises(DatasetError) as caught:
        opened(file, columns=columns)
    for part in told:
        assert part in caught.value.message


def test_a_name_that_another_column_hides_is_told_with_the_one_to_write(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}], "text": "b"}])
    with pytest.raises(DatasetError, match=r"write columns\.messages instead of columns\.prompt"):
        opened(file, columns={"prompt": "text"})


def test_columns_and_a_known_dataset_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave columns out"):
        DatasetConfig(name="gsm8k", columns={"prompt": "question"})


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.csv", b"question;answer\n1;2\n", ("the header is one column", "','")),
        ("rows.csv", b"question,question\n1,2\n", ("'question' twice",)),
        ("rows.csv", b"question,\n1,2\n", ("column 2 has no name",)),
        ("rows.csv", b"question,answer\n1+1,2\na,b,c\n", ("line 3", "3 values", "2 columns", "quotes")),
        ("rows.csv", b'question,answer\n"1+1,2\n', ("line", "quote missing")),
        ("rows.csv", "question,answer\né,2\n".encode("latin-1"), ("not in UTF-8", "save it in UTF-8")),
        ("rows.csv", b"question,answer\n", ("holds no rows",)),
        ("rows.csv", b"", ("holds no rows",)),
        ("rows.json", b'{"data": [{"a": 1}],\n "version": 2}', ("one JSON object", "'data'")),
        ("rows.json", b'{\n "a": 1\n}', ("one JSON object, not rows",)),
        ("rows.json", b'[{"a": 1}, 5]', ("element 2", "not int")),
        ("rows.json", b'[{"a": 1},', ("begins as a JSON array", "not valid JSON")),
        ("rows.json", b"[]", ("holds no rows",)),
        ("rows.jsonl", b'[{"a": 1}]', ("row 1", "not list")),
        ("rows.jsonl.gz", b"\x1f\x8b", ("packed", "unpack")),
        ("rows.txt", b"1+1\n", ("no kind that is read", ".csv", ".parquet")),
        ("rows.xlsx", b"PK", ("no kind that is read",)),
    ],
)
def test_a_file_that_is_no_file_of_rows_has_its_fault_told(
    tmp_path: Path, name: str, content: bytes, told: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        opened(tmp_path / name)
    for part in (name, *told) if "row 1" not in told else told:
        assert part in caught.value.message


@pytest.mark.parametrize("name", ["./nowhere.csv", "nowhere.json", "/nowhere/rows.tsv", "./nowhere"])
def test_a_file_that_is_not_there_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        open_source(DatasetConfig(path=name), 0)


LONG = [
    "12345678901234567890123",
    "-9223372036854775809",
    "18446744073709551616",
    "3.14159265358979323846",
    "0.1000000000000000055",
]


@pytest.mark.parametrize("number", LONG)
@pytest.mark.parametrize(
    "place", ['"answer": {}', '"answer": "1", "metadata": {{"a": [1, {{"b": {}}}]}}', '"answer": [[{}]]']
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_number_that_64_bits_do_not_hold_leaves_its_row_out_and_none_is_changed(
    tmp_path: Path, suffix: str, place: str, number: str
) -> None:
    good = '{"question": "q", "answer": [18446744073709551615, -9223372036854775808, 0.30000000000000004, 1.50000000000000000000]}'
    rows = [good, f'{{"question": "q", {place.format(number)}}}']
    file = tmp_path / f"rows{suffix}"
    file.write_text("[" + ",".join(rows) + "]" if suffix == ".json" else "\n".join(rows))
    source = open_source(DatasetConfig(path=str(file)), 0)
    assert len(source) == 1 and source[0].data["answer"] == [
        18446744073709551615,
        -9223372036854775808,
        0.30000000000000004,
        1.5,
    ]
    assert "row 2: cannot be written as JSON" in str(source.left_out)
    assert "write long numbers as text" in str(source.left_out)


@pytest.mark.parametrize("number", LONG)
def test_the_form_math_keeps_each_digit_of_a_number(tmp_path: Path, number: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"problem": "q", "answer": {number}}}')
    assert opened(file, form="math")[0]["answer"] == number


SYSTEM, USER, SAID = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([USER, SAID], "ends with a message of the role 'assistant'.*column `answer`"),
        ([SYSTEM, USER, SAID, USER, SAID], "ends with a message of the role 'assistant'"),
        ([SYSTEM], "ends with a message of the role 'system'"),
        ([SYSTEM, SYSTEM, USER], "message 2 of the role 'system' behind others"),
        ([USER, SYSTEM, USER], "message 2 of the role 'system' behind others"),
        ([{"role": "human", "content": "x"}], "the role 'human': write one of system, "),
        ([{"role": None, "content": "x"}], "the role None"),
        ([{**USER, "content": " "}], "message 1 of the role 'user' without text"),
        ([{**USER, "content": None}], "message 1 of the role 'user' without text"),
        ([{**USER, "content": []}], "message 1 of the role 'user' without text"),
        ([{"role": "user"}], "message 1 of the role 'user' without text"),
        ([], "neither text nor a list of messages"),
    ],
)
def test_messages_that_no_policy_can_answer_leave_their_row_out(messages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(DatasetError, match=f"row 1: messages .*{told}|row 1: messages is {told}"):
        prompt_in({"messages": messages}, None, "row 1")


# --- sources of rows


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
