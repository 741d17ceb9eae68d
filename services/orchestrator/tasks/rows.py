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
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from services.common.dataset_rows import PROMPT_FIELDS, TRUTH_FIELDS
from services.common.errors import DatasetError
from services.common.records import Task
from services.orchestrator.tasks.code_rows import code_row
from services.orchestrator.tasks.math_rows import math_row

# --- Catalogue of named datasets: their ids on the hub, their local paths, and the conversion of their rows.


DATA_ROOT = "ROLLMILL_DATA_ROOT"
Normalise = Callable[[Mapping[str, Any], str], dict[str, Any]]
FORMS: dict[str, Normalise] = {"math": math_row, "code": code_row}  # by the reward that reads them

# The reference leaves out 547 of the training games, without a stated reason.
_ALFWORLD_TRAIN = """
0-21 42-102 108-109 111-114 116 118-143 145-162 164-182 184-190 192-202 204-205 207-208 210-279 283-336 338-422
424-428 430-455 457-556 558-612 632-698 700-701 703-711 713-723 725-730 732-817 835-880 882-914 916-944 955-969
971-977 979-984 986-989 991-1113 1115-1156 1158-1173 1175-1180 1182-1200 1202-1332 1334-1476 1478-1558 1560-1565
1567-1599 1602-1617 1619-1633 1635-1638 1640-1659 1661-1740 1742-1889 1891-1927 1929-1970 1972-2017 2019-2025
2027-2132 2134-2136 2138-2173 2175-2205 2207-2211 2213-2354 2356-2475 2477-2481 2483-2487 2489-2611 2613-2824
2827-2853 2855 2857-2937 2939-2953 2955 2978-3009 3011-3031 3033-3035 3060-3092 3100-3108 3129-3133 3190-3193
3241-3260 3273-3291 3309-3326 3332-3354 3361-3407 3415-3417 3474-3484 3527-3536 3543-3546 3559-3564 3605-3643
3646-3726 3728-3759 3761-3766 3769-3824 3826-3830 3837-3932 3934-4019 4022-4038 4040-4067 4069-4164 4166-4394
4396-4441 4443 4445-4494 4496-4563 4565-4574 4576-4587 4589-4622 4626-4648
"""


def _numbers(ranges: str) -> tuple[int, ...]:
    """The whole numbers of ranges like ``0-21 116``, both ends included."""
    ends = (tuple(map(int, part.split("-"))) for part in ranges.split())
    return tuple(chain.from_iterable(range(pair[0], pair[-1] + 1) for pair in ends))


ALFWORLD_TRAIN = _numbers(_ALFWORLD_TRAIN)
ALFWORLD_VALID = range(4649, 4699)
WEBSHOP_TRAIN = range(200, 12_087)
WEBSHOP_VALID = range(200)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """One dataset. ``local`` is a path under the data root; ``fetch`` the command for a dataset without automatic
    fetch."""

    normalise: Normalise | None = None  # None: rows are taken as they are
    local: str = ""
    indices: Sequence[int] | None = None  # rows are these numbers, {"index": n}, and there is no file
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    fetch: str = ""


KNOWN: dict[str, KnownDataset] = {
    "deepcoder-primeintellect": KnownDataset(
        hub="agentica-org/DeepCoder-Preview-Dataset", subset="primeintellect",
        local="deepcoder_primeintellect/train.jsonl", normalise=code_row,
    ),
    "deepcoder-codeforces": KnownDataset(
        hub="agentica-org/DeepCoder-Preview-Dataset", subset="codeforces", split="test",
        local="deepcoder_codeforces/test.jsonl", normalise=code_row,
    ),
    "deepscaler": KnownDataset(
        hub="agentica-org/DeepScaleR-Preview-Dataset", local="deepscaler/sample.jsonl", normalise=math_row
    ),
    "dapo-filter": KnownDataset(hub="aaabiao/dapo_filter", local="dapo_filter/train.jsonl", normalise=math_row),
    "dapo-math-17k": KnownDataset(  # subsets on the hub: all (17,398 rows), en and cn
        hub="open-r1/DAPO-Math-17k-Processed", subset="all", local="dapo_math_17k/train.jsonl", normalise=math_row
    ),
    "gsm8k": KnownDataset(hub="openai/gsm8k", subset="main", local="gsm8k/train.jsonl", normalise=math_row),
    "math-train": KnownDataset(local="math_train/train.jsonl", normalise=math_row),
    "aime-1983-2023": KnownDataset(local="aime_1983_2023/train.jsonl", normalise=math_row),
    "aime24": KnownDataset(
        hub="HuggingFaceH4/aime_2024", local="aime24/test.jsonl", normalise=math_row
    ),
    "aime25": KnownDataset(hub="math-ai/aime25", split="test", local="aime25/test.jsonl", normalise=math_row),
    "amc24": KnownDataset(hub="rawsh/2024_AMC12", local="amc24/train.jsonl", normalise=math_row),
    "amc23": KnownDataset(hub="math-ai/amc23", split="test", local="amc23/test.jsonl", normalise=math_row),
    "minerva-math": KnownDataset(
        hub="math-ai/minervamath", split="test", local="minerva_math/test.jsonl", normalise=math_row
    ),
    "math500": KnownDataset(
        hub="HuggingFaceH4/MATH-500", split="test", local="math500/test.jsonl", normalise=math_row
    ),
    "humaneval": KnownDataset(
        hub="openai/openai_humaneval", split="test", local="humaneval/HumanEval.jsonl", normalise=code_row
    ),
    "code-contests": KnownDataset(local="code_contests/test.jsonl", normalise=code_row),
    "leetcode": KnownDataset(local="leetcode/train.jsonl", normalise=code_row),
    "alfworld-train": KnownDataset(indices=ALFWORLD_TRAIN),
    "alfworld-valid": KnownDataset(indices=ALFWORLD_VALID),
    "webshop-train": KnownDataset(indices=WEBSHOP_TRAIN),
    "webshop-valid": KnownDataset(indices=WEBSHOP_VALID),
    "livecodebench-v5": KnownDataset(
        local="AReaL-boba-2-RL-Code/code_benchmark/lcb_v5/test.jsonl", normalise=code_row,
        fetch="hf download inclusionAI/AReaL-boba-2-RL-Code --repo-type dataset "
        "--local-dir <data root>/AReaL-boba-2-RL-Code",
    ),
}  # fmt: skip


def known(name: str) -> KnownDataset:
    """The entry of a name; ``DatasetError`` lists the known names."""
    if name not in KNOWN:
        raise DatasetError(f"no dataset is known as {name!r}; write one of {', '.join(KNOWN)}, or a path")
    return KNOWN[name]


def local_file(name: str) -> Path | None:
    """The file of a dataset on this disk, or None."""
    root, entry = os.environ.get(DATA_ROOT), known(name)
    path = Path(root, entry.local) if root and entry.local else None
    return path if path is not None and path.is_file() else None


def is_fetched(name: str) -> bool:
    """Whether opening the dataset would fetch from the hub."""
    entry = known(name)
    return entry.indices is None and entry.hub is not None and local_file(name) is None


def must_be_fetched_by_hand(name: str, setting: str) -> str:
    """The steps before the dataset can be opened, with the name of the ``setting``; empty when there are none."""
    entry = known(name)
    ready = entry.indices is not None or entry.hub is not None or local_file(name) is not None
    return "" if ready else how_to_get(name, setting)


def how_to_get(name: str, setting: str = "data.train.name") -> str:
    """The steps when a dataset is neither local nor on the hub; names id, key and path."""
    entry = known(name)
    root = os.environ.get(DATA_ROOT)
    place = Path(root or f"${DATA_ROOT}", entry.local)
    unset = "" if root else f" ({DATA_ROOT} is not set)"
    parts = [f"dataset {name!r} ({setting}): looked for {place}{unset}"]
    if entry.fetch:
        parts.append(
            f"it is not fetched automatically; run: {entry.fetch.replace('<data root>', str(root or f'${DATA_ROOT}'))}"
        )
    elif entry.hub is None:
        parts.append("no hub has this dataset; put the file there")
    else:
        where = (
            f"{entry.hub}, subset {entry.subset}, split {entry.split}"
            if entry.subset
            else f"{entry.hub}, split {entry.split}"
        )
        parts.append(f"or on the hub as {where}; a local file at that path replaces it")
    return "; ".join(parts)


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


class Rows:
    """Raw rows by position, read on demand. ``rows[place]`` raises ``DatasetError`` with the row's number for a row that
    cannot be read."""

    def __init__(self, name: str, numbers: Sequence[int], read: Callable[[int], Mapping[str, Any]]) -> None:
        """``name``: in error messages. ``numbers``: those of the rows for users, from 1, as lines of a file are counted."""
        self.name = name
        self.numbers = numbers
        self._read = read

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._read(place)


class ListRows(Rows):
    """Rows held in memory, or those of a Hugging Face dataset, which stays on disk; errors in the place of rows that cannot
    be read."""

    def __init__(self, rows: Sequence[Mapping[str, Any] | DatasetError], name: str) -> None:
        super().__init__(name, range(1, len(rows) + 1), self._row)
        self._rows = rows

    def _row(self, place: int) -> Mapping[str, Any]:
        row = self._rows[place]
        if isinstance(row, DatasetError):
            raise row
        return row


class JsonlRows(Rows):
    """One JSON object per line, empty lines passed over; only line offsets stay in memory."""

    def __init__(self, path: Path, limit: int | None, name: str) -> None:
        places, numbers = array("q"), array("q")  # (offset, length) of each row; line numbers
        offset = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if limit is not None and len(numbers) >= limit:
                        break
                    if line.strip():
                        places.extend((offset, len(line)))
                        numbers.append(number)
                    offset += len(line)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable even when the file is replaced
        except OSError as error:
            raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._fd)
        super().__init__(name, numbers, self._line)
        self._places = places

    def _line(self, place: int) -> Mapping[str, Any]:
        offset, length = self._places[2 * place : 2 * place + 2]
        where = f"row {self.numbers[place]}"
        try:
            data = exact_json(os.pread(self._fd, length, offset).removeprefix(codecs.BOM_UTF8))
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise DatasetError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise DatasetError(f"{where}: a row must be a JSON object, not {type(data).__name__}")
        return data


def split_rows(rows: Rows, every: int, *, held_out: bool) -> Rows:
    """Every ``every``-th row of another source, or all the others; each keeps its number.

    >>> rows = ListRows([{"n": n} for n in range(1, 8)], "rows")
    >>> [row["n"] for row in split_rows(rows, 3, held_out=True)]
    [3, 6]
    """
    places = array("q", (place for place in range(len(rows)) if ((place + 1) % every == 0) is held_out))
    return Rows(rows.name, array("q", (rows.numbers[place] for place in places)), lambda place: rows[places[place]])


def renamed_rows(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """The rows of another source with some columns under further names.

    ``columns``: name -> column; a column within another one is written with dots.
    """

    def read(place: int) -> Mapping[str, Any]:
        row, where = rows[place], f"row {rows.numbers[place]}"
        found = {name: _column(row, column, f"{where}: columns.{name}") for name, column in columns.items()}
        for fields in (PROMPT_FIELDS, TRUTH_FIELDS):
            mapped = next((name for name in fields if name in found), None)
            read = next((name for name in fields if name in found or name in row), None)
            if mapped is not None and read != mapped:
                raise DatasetError(
                    f"{where} has a column {read!r}, which is read before {mapped!r}: write columns.{read} instead of "
                    f"columns.{mapped}"
                )
        return {**row, **found}

    return Rows(rows.name, rows.numbers, read)


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
        rows: Rows,
        id_field: str | None,
        normalise: Normalise | None = None,
        required: Requirement | None = None,
    ) -> None:
        self._rows, self._id_field, self._normalise = rows, id_field, normalise
        self.left_out = SkippedRows()
        places = array("q")
        seen: dict[str, int] = {}
        for place in range(len(rows)):
            try:
                task = self._task(place)
                if required is not None:
                    required(task.data, f"row {rows.numbers[place]}")
                if id_field is not None and task.task_id in seen:
                    before = f"was used in row {seen[task.task_id]}; task ids must be unique"
                    raise DatasetError(f"row {rows.numbers[place]}: {id_field} {task.task_id!r} {before}")
            except DatasetError as error:
                self.left_out.add(error.message)
                continue
            places.append(place)
            if id_field is not None:
                seen[task.task_id] = rows.numbers[place]
        if not len(rows):
            raise DatasetError(f"{rows.name} holds no rows")
        if not places:
            raise DatasetError(f"{rows.name} holds no row that can be used ({len(rows)} looked at): {self.left_out}")
        self._places = places
        self.num_too_long = 0  # tasks that ``prompts`` has left out

    def only(self, rows: Sequence[int], left_out: SkippedRows, num_too_long: int) -> UsableRows:
        """Some of these tasks, with the new counts of the others."""
        found = copy(self)
        found._places = array("q", map(self._places.__getitem__, rows))
        found.left_out, found.num_too_long = left_out, num_too_long
        return found

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> Task:
        return self._task(self._places[row])

    def _task(self, place: int) -> Task:
        raw, where = self._rows[place], f"row {self._rows.numbers[place]}"
        data = raw if self._normalise is None else self._normalise(raw, where)
        try:  # as the journal and the wire will: integers of 64 bits, no sets, no bytes
            orjson.dumps(data)
        except orjson.JSONEncodeError as error:
            remedy = "; write long numbers as text, in quotes" if re.search("64-bit|Decimal", str(error)) else ""
            raise DatasetError(f"{where}: cannot be written as JSON: {error}{remedy}") from None
        if self._id_field is None:
            return Task(task_id=str(self._rows.numbers[place]), data=data)
        if self._id_field not in raw:
            raise DatasetError(f"{where}: no field {self._id_field!r} (data.id_field); it has {', '.join(raw)}")
        return Task(task_id=str(raw[self._id_field]), data=data)
