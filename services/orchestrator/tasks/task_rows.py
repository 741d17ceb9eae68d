"""Rows of a dataset by position, read on demand, and the tasks that are made of them.

Raw rows are those of a file, of a Hugging Face dataset or of a list, and views of others: a held-out part, renamed columns.
``UsableRows`` makes tasks of them. ``datasets`` opens the rows.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from services.common.errors import DatasetError
from services.common.records.dataset_rows import PROMPT_FIELDS, TRUTH_FIELDS
from services.common.records.types import Task
from services.orchestrator.tasks.catalogue import Normalise

Requirement = Callable[[Mapping[str, Any], str], None]  # raises DatasetError that names a row by its second argument

NUM_REASONS = 3
_MAX_REASON_CHARS = 300


_LONG_NUMBER = re.compile(rb"\d[\d.]{15}")


def exact_json(text: bytes) -> Any:
    """The value of a JSON text. A number with more digits than 64 bits hold is an ``int`` or a ``Decimal``, never a near one.

    Raises ``orjson.JSONDecodeError``, and ``RecursionError`` for a value that is nested too deeply.
    """
    value = orjson.loads(text)
    if _LONG_NUMBER.search(text):
        value = json.loads(text, parse_int=_exact, parse_float=_exact)
    return value


def _exact(digits: str) -> int | float | Decimal:
    if digits.lstrip("-").isdigit() and len(digits) < sys.int_info.default_max_str_digits:
        return int(digits)
    exact, near = Decimal(digits), float(digits)
    return near if exact == Decimal(repr(near)) else exact


class RawRows(Protocol):
    """``rows[place]`` raises ``DatasetError`` with the row's number for a row that cannot be read."""

    @property
    def name(self) -> str:
        """The dataset's name in error messages."""
        ...

    def __len__(self) -> int: ...

    def number(self, place: int) -> int:
        """The row's number for users: from 1, as lines of a file are counted."""
        ...

    def __getitem__(self, place: int) -> Mapping[str, Any]: ...


class JsonlRows:
    """One JSON object per line, empty lines passed over; only line offsets stay in memory."""

    def __init__(self, path: Path, limit: int | None, name: str) -> None:
        self.name = name
        offsets: list[int] = []
        lengths: list[int] = []
        numbers: list[int] = []
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if limit is not None and len(offsets) >= limit:
                        break
                    if line.strip():
                        offsets.append(offset)
                        lengths.append(len(line))
                        numbers.append(number)
                    offset += len(line)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable even when the file is replaced
        except OSError as error:
            raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._fd)
        self._offsets = np.asarray(offsets, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._numbers = np.asarray(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def number(self, place: int) -> int:
        return int(self._numbers[place])

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        line = os.pread(self._fd, int(self._lengths[place]), int(self._offsets[place])).removeprefix(codecs.BOM_UTF8)
        where = f"row {self.number(place)}"
        try:
            data = exact_json(line)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise DatasetError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise DatasetError(f"{where}: a row must be a JSON object, not {type(data).__name__}")
        return data


class ListRows:
    """Rows held in memory, or those of a Hugging Face dataset, which stays on disk."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        self.name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, place: int) -> int:
        return place + 1

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._rows[place]


class HarborRows(ListRows):
    """Task directories: rows, or the errors of those that cannot be played."""

    def __init__(self, rows: Sequence[Mapping[str, Any] | DatasetError], name: str) -> None:
        super().__init__([{} if isinstance(row, DatasetError) else row for row in rows], name)
        self._errors = {place: row for place, row in enumerate(rows) if isinstance(row, DatasetError)}

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        if place in self._errors:
            raise self._errors[place]
        return super().__getitem__(place)


class HeldOutRows:
    """Every ``every``-th row of another source, or all the others; each keeps its number.

    >>> rows = ListRows([{"n": n} for n in range(1, 8)], "rows")
    >>> [HeldOutRows(rows, 3, held_out=True)[place]["n"] for place in range(2)]
    [3, 6]
    """

    def __init__(self, rows: RawRows, every: int, *, held_out: bool) -> None:
        self.name = rows.name
        self._rows, self._every, self._held_out = rows, every, held_out

    def __len__(self) -> int:
        num_held_out = len(self._rows) // self._every
        return num_held_out if self._held_out else len(self._rows) - num_held_out

    def number(self, place: int) -> int:
        return self._rows.number(self._place(place))

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._rows[self._place(place)]

    def _place(self, place: int) -> int:
        if self._held_out:
            return (place + 1) * self._every - 1
        return place + place // (self._every - 1)


class RenamedRows:
    """The rows of another source with some columns under further names.

    ``columns``: name -> column; a column within another one is written with dots.
    """

    def __init__(self, rows: RawRows, columns: Mapping[str, str]) -> None:
        self.name = rows.name
        self._rows, self._columns = rows, dict(columns)

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, place: int) -> int:
        return self._rows.number(place)

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        row, where = self._rows[place], f"row {self.number(place)}"
        found = {name: _column(row, column, f"{where}: columns.{name}") for name, column in self._columns.items()}
        for fields in (PROMPT_FIELDS, TRUTH_FIELDS):
            mapped = next((name for name in fields if name in found), None)
            read = next((name for name in fields if name in found or name in row), None)
            if mapped is not None and read != mapped:
                raise DatasetError(
                    f"{where} has a column {read!r}, which is read before {mapped!r}: write columns.{read} instead of "
                    f"columns.{mapped}"
                )
        return {**row, **found}


def _column(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DatasetError(f"{where} is {column!r}, which the row lacks; it has {', '.join(map(str, row))}")
        value = value[part]
    return value


@dataclass(slots=True)
class SkippedRows:
    """Counts rows and keeps the reasons of the first three.

    >>> left_out = SkippedRows()
    >>> for number in range(2, 7):
    ...     left_out.add(f"row {number}: no answer")
    >>> str(left_out)
    'row 2: no answer; row 3: no answer; row 4: no answer; and 2 more'
    """

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < NUM_REASONS:
            cut = len(reason) > _MAX_REASON_CHARS
            self.reasons.append(reason[: _MAX_REASON_CHARS - 3] + "..." if cut else reason)

    def __str__(self) -> str:
        more = self.count - len(self.reasons)
        return "; ".join([*self.reasons, *([f"and {more} more"] if more else [])])


class UsableRows:
    """The rows of which tasks can be made: readable, in one form where there is one, named once, and plain data.

    Raises:
        DatasetError: there is none; with the reasons of the first three rows.
    """

    def __init__(
        self,
        rows: RawRows,
        id_field: str | None,
        normalise: Normalise | None = None,
        required: Requirement | None = None,
    ) -> None:
        self._rows, self._id_field, self._normalise = rows, id_field, normalise
        self.left_out = SkippedRows()
        places: list[int] = []
        seen: dict[str, int] = {}
        for place in range(len(rows)):
            try:
                task = self._task(place)
                if required is not None:
                    required(task.data, self._where(place))
                if id_field is not None and task.task_id in seen:
                    before = f"was used in row {seen[task.task_id]}; task ids must be unique"
                    raise DatasetError(f"{self._where(place)}: {id_field} {task.task_id!r} {before}")
            except DatasetError as error:
                self.left_out.add(error.message)
                continue
            places.append(place)
            if id_field is not None:
                seen[task.task_id] = rows.number(place)
        if not len(rows):
            raise DatasetError(f"{rows.name} holds no rows")
        if not places:
            raise DatasetError(f"{rows.name} holds no row that can be used ({len(rows)} looked at): {self.left_out}")
        self._places = np.asarray(places, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> Task:
        return self._task(int(self._places[row]))

    def _where(self, place: int) -> str:
        return f"row {self._rows.number(place)}"

    def _task(self, place: int) -> Task:
        raw, where = self._rows[place], self._where(place)
        data = raw if self._normalise is None else self._normalise(raw, where)
        try:  # as the journal and the wire will: integers of 64 bits, no sets, no bytes
            orjson.dumps(data)
        except orjson.JSONEncodeError as error:
            remedy = "; write long numbers as text, in quotes" if re.search("64-bit|Decimal", str(error)) else ""
            raise DatasetError(f"{where}: cannot be written as JSON: {error}{remedy}") from None
        if self._id_field is None:
            return Task(task_id=str(self._rows.number(place)), data=data)
        if self._id_field not in raw:
            raise DatasetError(f"{where}: no field {self._id_field!r} (data.id_field); it has {', '.join(raw)}")
        return Task(task_id=str(raw[self._id_field]), data=data)
