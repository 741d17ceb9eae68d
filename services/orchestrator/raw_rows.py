"""Rows as they lie in a file, a Hugging Face dataset or memory: read by place, on demand.

Knows nothing about tasks: which rows are usable is decided in ``datasets``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from services.common.errors import DatasetError


class RawRows(Protocol):
    """``rows[place]`` raises ``DatasetError`` with the row's number for a row that cannot be read."""

    @property
    def name(self) -> str:
        """The dataset's name in error messages."""
        ...

    def __len__(self) -> int: ...

    def number(self, place: int) -> int:
        """The row's number for people: from 1, as lines of a file are counted."""
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
        line = os.pread(self._fd, int(self._lengths[place]), int(self._offsets[place]))
        where = f"row {self.number(place)}"
        try:
            data = orjson.loads(line)
        except orjson.JSONDecodeError as error:
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
