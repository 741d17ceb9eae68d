"""Opens files of rows by their names: JSON Lines, one JSON array, CSV and TSV. Parquet is read by ``datasets``.

Each kind has its faults told in words of its own: the header of a CSV file, the shape of a JSON file, a line that is cut off.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from services.common.errors import DatasetError
from services.orchestrator.tasks.task_rows import JsonlRows, ListRows, RawRows, exact_json

LINES, JSON, TABLES = (".jsonl", ".ndjson"), ".json", {".csv": ",", ".tsv": "\t"}
KINDS = (*LINES, JSON, *TABLES, ".parquet")
_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")
_LONGEST_FIELD = 1 << 30  # characters of one field of a table; the module's own bound is 128 KiB
_HEAD = 1 << 16  # bytes that are read to tell the kind of a JSON file


def is_file_of_rows(path: str) -> bool:
    """Whether a dataset's path means a file, and not a directory or the name of a dataset on the hub."""
    place = Path(path)
    return place.is_file() or place.suffix.lower() in KINDS or (path.startswith(("/", ".")) and not place.is_dir())


def open_file(path: Path, limit: int | None) -> RawRows:
    """The rows of a file; ``limit`` takes the first ones only.

    Raises:
        DatasetError: there is no such file, it is of no kind that is read, or its shape is wrong; with the remedy.
    """
    name, suffix = f"dataset file {path}", path.suffix.lower()
    if not path.is_file():
        raise DatasetError(f"{name} does not exist: write the path of a file, relative to the recipe with ./ before it")
    if suffix in _PACKED:
        raise DatasetError(f"{name} is packed: unpack it first")
    if suffix in TABLES:
        return ListRows(list(_table(path, TABLES[suffix], limit, name)), name)
    if suffix == JSON and (rows := _array(path, name)) is not None:
        return ListRows(rows[:limit], name)
    if suffix in (*LINES, JSON):
        return JsonlRows(path, limit, name)
    raise DatasetError(f"{name} is of no kind that is read: write a file that ends with {', '.join(KINDS)}")


def _table(path: Path, delimiter: str, limit: int | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a CSV or TSV file by its header; every value is text."""
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name} is not in UTF-8 ({error.reason} at byte {error.start}): save it in UTF-8") from None
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(lines, None)
        if header is None:
            return
        _check_header([column.strip() for column in header], name, delimiter)
        names = [column.strip() for column in header]
        for number, values in enumerate((line for line in lines if line), start=1):
            if limit is not None and number > limit:
                return
            if len(values) != len(names):
                raise DatasetError(
                    f"{name}, line {lines.line_num}: {len(values)} values, and the header names {len(names)} columns "
                    f"({', '.join(names)}): put values that hold a {delimiter!r} between quotes"
                )
            yield dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DatasetError(f"{name}, line {lines.line_num}: {error}: is a quote missing?") from None


def _check_header(names: list[str], name: str, delimiter: str) -> None:
    if len(names) == 1 and any(other in names[0] for other in ";,\t|"):
        raise DatasetError(f"{name}: the header is one column, {names[0]!r}: separate columns with {delimiter!r}")
    empty = [place for place, column in enumerate(names, start=1) if not column]
    if empty:
        raise DatasetError(f"{name}: column {empty[0]} has no name in the header, which is its first line: name it")
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise DatasetError(f"{name}: the header names {twice!r} twice: give one of them another name")


def _array(path: Path, name: str) -> list[Any] | None:
    """The rows of a file that is one JSON array; None for a file of JSON Lines.

    Raises:
        DatasetError: the file is one JSON object, or an array with an element that is no object.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
        is_array = head.startswith(b"[")
        if not is_array and (not head.startswith(b"{") or _is_json(head.partition(b"\n")[0])):
            return None  # an object in the first line: JSON Lines
        tree = exact_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, RecursionError) as error:
        if not is_array:
            return None  # lines are then told one by one
        raise DatasetError(f"{name} begins as a JSON array and is not valid JSON: {error}") from None
    if isinstance(tree, dict):
        inside = [key for key, value in tree.items() if isinstance(value, list)]
        where = f"; its rows seem to be under {inside[0]!r}" if inside else ""
        raise DatasetError(
            f"{name} is one JSON object, not rows{where}: write an array of objects, or one object per line"
        )
    wrong = next((number for number, row in enumerate(tree, start=1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise DatasetError(
            f"{name}, element {wrong}: a row must be a JSON object, not {type(tree[wrong - 1]).__name__}"
        )
    return list(tree)


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True
